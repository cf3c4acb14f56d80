// The gradients of merge_softmax: against the reverse pass of its formula, and through two halves against the whole.
#include <attn/softmax/merge_softmax.hpp>
#include <attn/softmax/merge_softmax_backward.hpp>

#include "support/refusal.hpp"
#include "support/run_backward.hpp"

namespace testing::merge_backward_tests {
namespace {

// out and lse of two parts merge by the weights of their denominators; a lse of -infinity has none.
std::vector<tensor<variable>> merged(const std::vector<tensor<variable>>& x) {
  const tensor<variable>&a = x[0], &la = x[1], &b = x[2], &lb = x[3];
  tensor<variable> out(a.batch(), a.heads(), a.length(), a.dim()), lse(a.batch(), a.heads(), a.length(), 1);
  for (std::size_t row = 0; row < lse.data.size(); ++row) {
    const double highest = std::max(la.data[row].value(), lb.data[row].value());
    lse.data[row] = -reference::infinity;
    if (std::isinf(highest)) continue;
    const variable wa = isinf(la.data[row]) ? variable(0) : exp(la.data[row] - highest);
    const variable wb = isinf(lb.data[row]) ? variable(0) : exp(lb.data[row] - highest);
    lse.data[row] = highest + log(wa + wb);
    for (std::size_t d = 0; d < static_cast<std::size_t>(a.dim()); ++d) {
      const std::size_t n = row * static_cast<std::size_t>(a.dim()) + d;
      out.data[n] = (wa * a.data[n] + wb * b.data[n]) / (wa + wb);
    }
  }
  return {out, lse};
}

gradient_case merge_case(idx_t length, idx_t dim) {
  gradient_case c;
  c.names = {"out", "lse", "other_out", "other_lse"};
  c.inputs = {random_normal(1, 2, 3, length, dim), random_normal(2, 2, 3, length, 1, 3),
              random_normal(3, 2, 3, length, dim), random_normal(4, 2, 3, length, 1, 3)};
  // A part that has seen no key has zeros; the first rows: the one, the other, both.
  for (idx_t i = 0; i < std::min<idx_t>(3, length); ++i)
    for (std::size_t part : {0u, 2u}) {
      if (i + 1 != 3 && (part == 0) != (i == 0)) continue;
      c.inputs[part + 1](0, 1, i, 0) = -reference::infinity;
      for (idx_t d = 0; d < dim; ++d) c.inputs[part](0, 1, i, d) = 0;
    }
  c.forward = merged;
  return c;
}

template <class S>
tensors library(const tensors& in, const tensors& d_results, bool with_d_lse, bool accumulate = false,
                std::size_t only = 4) {
  const tensor<S> a = cast<S>(in[0]), b = cast<S>(in[2]), d_out = cast<S>(d_results[0]);
  tensor<real<S>> la = cast<real<S>>(in[1]), lb = cast<real<S>>(in[3]), d_lse = cast<real<S>>(d_results[1]);
  tensor<S> da = a, db = b;
  tensor<real<S>> dla = la, dlb = lb;
  for (auto* x : {&da, &db}) std::fill(x->data.begin(), x->data.end(), S(0.25));
  for (auto* x : {&dla, &dlb}) std::fill(x->data.begin(), x->data.end(), real<S>(0.25));
  attn::merge_softmax_gradients<S> g;
  if (only == 4 || only == 0) g.out = view(da);
  if (only == 4 || only == 1) g.lse = row_view(dla);
  if (only == 4 || only == 2) g.other_out = view(db);
  if (only == 4 || only == 3) g.other_lse = row_view(dlb);
  if (with_d_lse) g.d_lse = row_view(d_lse);
  g.accumulate = accumulate;
  attn::merge_softmax_backward(view(a), row_view(la), view(b), row_view(lb), view(d_out), g);
  return {cast<double>(da), cast<double>(dla), cast<double>(db), cast<double>(dlb)};
}

template <class S>
void check(idx_t length, idx_t dim, bool with_d_lse) {
  gradient_case c = merge_case(length, dim);
  c.inputs[0] = rounded<S>(c.inputs[0]), c.inputs[2] = rounded<S>(c.inputs[2]);
  c.inputs[1] = rounded<real<S>>(c.inputs[1]), c.inputs[3] = rounded<real<S>>(c.inputs[3]);
  const auto round = [with_d_lse](tensors& d) {
    round_results<S>(d);
    if (!with_d_lse) std::fill(d[1].data.begin(), d[1].data.end(), 0.0);
  };
  check_gradients(
      c, gradient_tolerance<S>::value,
      [&](const tensors& in, const tensors& d) { return library<S>(in, d, with_d_lse); }, round);
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("merge_softmax_backward: the reverse pass of its formula", "[merge_backward]", all_types) {
  for (idx_t length : {0, 1, 3, 20})
    for (idx_t dim : {1, 3, 16, 33})
      for (bool with_d_lse : {false, true}) {
        CAPTURE(length, dim, with_d_lse);
        check<TestType>(length, dim, with_d_lse);
      }
}

TEMPLATE_LIST_TEST_CASE("merge_softmax_backward: gradients added, and each alone", "[merge_backward]", exact_types) {
  const gradient_case c = merge_case(9, 5);
  const tensors d = random_gradients(merged(independent(c.inputs)));
  const tensors written = library<TestType>(c.inputs, d, true), added = library<TestType>(c.inputs, d, true, true);
  for (std::size_t n = 0; n < 4; ++n) {
    CAPTURE(n);
    tensor<double> sum = written[n];
    for (double& x : sum.data) x += 0.25;
    CHECK(relative_error(added[n], sum) <= static_cast<double>(std::numeric_limits<TestType>::epsilon()));
    const tensors alone = library<TestType>(c.inputs, d, true, false, n);
    for (std::size_t other = 0; other < 4; ++other)
      CHECK(alone[other] == (other == n ? written[n]
                                        : tensor<double>(alone[other].batch(), alone[other].heads(),
                                                         alone[other].length(), alone[other].dim(), 0.25)));
  }
}

// The gradients of q, k and v through two halves of the keys, merged, are those of the whole.
TEMPLATE_LIST_TEST_CASE("merge_softmax_backward: two halves give the gradients of the whole", "[merge_backward]",
                        exact_types) {
  using T = TestType;
  const auto p =
      rounded<T>(random_problem<full_softmax_problem>({.queries = 21, .keys = 40, .dim = 9, .value_dim = 12}));
  const gradient_case c = case_of(p, true);
  const reference_gradients wanted = gradients_of(c, round_results<T>);

  full_softmax_problem half[2] = {p, p};
  tensors parts, d_parts[2];  // out, lse of the one and of the other
  for (idx_t n = 0; n < 2; ++n) {
    half[n].k = rows(p.k, 15 * n, n ? 25 : 15), half[n].v = rows(p.v, 15 * n, n ? 25 : 15);
    const reference::result r = run<T>(half[n]);
    parts.push_back(r.out), parts.push_back(r.lse);
  }
  const tensors d = library<T>(parts, wanted.d_results, true);
  d_parts[0] = {d[0], d[1]}, d_parts[1] = {d[2], d[3]};
  named_tensors by_half[2];
  for (std::size_t n = 0; n < 2; ++n) by_half[n] = library_gradients<T>(half[n], case_of(half[n], true), d_parts[n]);
  tensor<double> dq = by_half[0].at("q");
  for (std::size_t n = 0; n < dq.data.size(); ++n) dq.data[n] += by_half[1].at("q").data[n];
  CHECK(relative_error(dq, wanted.gradients[0]) <= 2 * gradient_tolerance<T>::value);
  CHECK(relative_error(by_half[0].at("k"), rows(wanted.gradients[1], 0, 15)) <= 2 * gradient_tolerance<T>::value);
  CHECK(relative_error(by_half[1].at("k"), rows(wanted.gradients[1], 15, 25)) <= 2 * gradient_tolerance<T>::value);
  CHECK(relative_error(by_half[1].at("v"), rows(wanted.gradients[2], 15, 25)) <= 2 * gradient_tolerance<T>::value);
}

TEST_CASE("merge_softmax_backward: bad input is refused before anything is written", "[merge_backward]") {
  tensor<float> a(1, 2, 3, 4, 1), b = a, d_out = a, da(1, 2, 3, 4, 7), db = da;
  tensor<float> la(1, 2, 3, 1, 0), lb = la, dla(1, 2, 3, 1, 7), dlb = dla;
  const auto message = [&](const auto& alter) {
    attn::merge_softmax_gradients<float> g{
        .out = view(da), .lse = row_view(dla), .other_out = view(db), .other_lse = row_view(dlb)};
    in_view<float> first = view(std::as_const(a)), second = view(std::as_const(b)), d = view(std::as_const(d_out));
    alter(first, second, d, g);
    const std::string said =
        refusal([&] { attn::merge_softmax_backward(first, row_view(la), second, row_view(lb), d, g); });
    for (const auto* x : {&da, &db, &dla, &dlb})
      CHECK(std::all_of(x->data.begin(), x->data.end(), [](float value) { return value == 7; }));
    CHECK(well_formed(said, "merge_softmax_backward"));
    return said;
  };
  CHECK(message([](auto&, auto& second, auto&, auto&) { second = second.slice(2, 0, 2); }).find("other_out") !=
        std::string::npos);
  CHECK(message([](auto&, auto&, auto& d, auto&) { d = d.slice(3, 0, 2); }).find("d_out") != std::string::npos);
  CHECK(message([](auto&, auto&, auto&, auto& g) { g.out = g.out.slice(2, 0, 2); }).find("out") != std::string::npos);
  CHECK(message([](auto&, auto&, auto&, auto& g) { g.lse = g.lse.slice(2, 0, 2); }).find("lse") != std::string::npos);
  CHECK(message([](auto&, auto&, auto&, auto& g) { g.out = g.other_out; }).find("overlap") != std::string::npos);
  CHECK(message([&](auto&, auto&, auto&, auto& g) { g.other_out = view(d_out); }).find("overlap") != std::string::npos);
  CHECK(message([&](auto&, auto&, auto&, auto& g) { g.lse = row_view(lb); }).find("overlap") != std::string::npos);
}

}  // namespace testing::merge_backward_tests
