// The gradients of pointwise against the reverse pass of its reference: functions, windows, options, all types.
#include "support/catch.hpp"
#include "support/refusals.hpp"
#include "support/run_pointwise.hpp"

namespace testing::pointwise_backward_tests {
namespace {

using kind = reference::pointwise_kind;

pointwise_problem problem_of(kind f, bool causal, idx_t left, idx_t right, idx_t queries = 67, idx_t keys = 90) {
  auto p = random_problem<pointwise_problem>({.queries = queries, .keys = keys, .dim = 9, .value_dim = 12}, 3);
  auto& o = p.options;
  o.kind = f, o.causal = causal, o.left = left, o.right = right, o.weight = 0.5, o.shift = -0.5;
  return p;
}
// With all options; `wide`: bias of pairs, else one broadcast over queries and batch items.
pointwise_problem with_options(pointwise_problem p, bool wide) {
  auto& o = p.options;
  const idx_t queries = p.q.length(), keys = p.k.length();
  o.softcap = 1.5, o.alibi_slopes = {0.5, 0.25, 0.125, 0}, o.relative_bias = random_normal(6, 1, 1, wide ? 4 : 1, 31);
  o.bias = wide ? random_normal(5, 2, 4, queries, keys) : random_normal(5, 1, 1, 1, keys);
  o.row_weights = random_normal(7, 1, 1, wide ? 2 : 1, queries), o.key_mask = random_key_mask(8, 2, keys);
  o.query_lengths = {queries, queries - 9}, o.key_lengths = {keys - 6, keys};
  return p;
}

template <class S>
void check(const pointwise_problem& given) {
  const pointwise_problem p = rounded<S>(given);
  const gradient_case c = case_of(p);
  const reference_gradients wanted = gradients_of(c, [](tensors& d) { d[0] = rounded<S>(d[0]); });
  attn::execution serial, three(3, 0);
  const named_tensors actual = library_gradients<S>(p, wanted.d_results[0], serial);
  for (std::size_t n = 0; n < c.names.size(); ++n) {
    INFO("gradient of " << c.names[n]);
    CHECK(relative_error(actual.at(c.names[n]), wanted.gradients[n]) <= 2 * product_gradient_tolerance<S>);
  }
  CHECK(library_gradients<S>(p, wanted.d_results[0], three) == actual);
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("pointwise_backward: functions, windows and options", "[pointwise_backward]", all_types) {
  for (kind f : {kind::sigmoid, kind::silu, kind::relu, kind::squared_relu})
    for (int window : {0, 1, 2}) {
      CAPTURE(static_cast<int>(f), window);
      const auto p = problem_of(f, window == 1, window > 0 ? 20 : -1, window == 2 ? 11 : -1);
      check<TestType>(p);
      check<TestType>(with_options(p, window != 1));
    }
}

TEST_CASE("pointwise_backward: the reverse pass agrees with central differences", "[pointwise_backward]") {
  for (kind f : {kind::sigmoid, kind::silu, kind::squared_relu})
    check_central_differences(case_of(with_options(problem_of(f, true, 9, -1, 17, 19), true)));
}

TEST_CASE("pointwise_backward: accumulates", "[pointwise_backward]") {
  const auto p = rounded<float>(with_options(problem_of(kind::silu, true, 20, -1), true));
  const tensor<double> d = rounded<float>(random_normal(77, 2, 4, 67, 12));
  attn::execution serial;
  const named_tensors written = library_gradients<float>(p, d, serial),
                      added = library_gradients<float>(p, d, serial, true, 0.25);
  for (const auto& [name, x] : written) {
    INFO("gradient of " << name);
    tensor<double> sum = x;
    for (double& number : sum.data) number += 0.25;
    CHECK(relative_error(added.at(name), sum) <= 5e-6);
  }
}

TEST_CASE("pointwise_backward: a function of the caller's with its derivative", "[pointwise_backward]") {
  const auto p = rounded<float>(problem_of(kind::squared_relu, true, -1, -1));
  const tensor<double> d = rounded<float>(random_normal(77, 2, 4, 67, 12));
  attn::execution serial;
  const named_tensors wanted = library_gradients<float>(p, d, serial);
  const stored_pointwise<float> stored(p.options);
  const tensor<float> q = cast<float>(p.q), k = cast<float>(p.k), v = cast<float>(p.v), d_out = cast<float>(d);
  tensor<float> dq = q, dk = k, dv = v;
  compiled_pointwise<float>::backward(
      view(q), view(k), view(v), {}, view(d_out), {.q = view(dq), .k = view(dk), .v = view(dv)}, stored.options(),
      [](float s) { return s > 0 ? s * s : 0; }, [](float s) { return s > 0 ? 2 * s : 0; }, serial);
  CHECK(relative_error(cast<double>(dq), wanted.at("q")) <= 1e-6);
  CHECK(relative_error(cast<double>(dk), wanted.at("k")) <= 1e-6);
  CHECK(relative_error(cast<double>(dv), wanted.at("v")) <= 1e-6);
}

TEST_CASE("pointwise_backward: NaN in what is not seen changes no bit", "[pointwise_backward]") {
  for (kind f : {kind::sigmoid, kind::silu, kind::relu, kind::squared_relu}) {
    const auto p = rounded<float>(with_options(problem_of(f, false, 20, 11), true));
    const tensor<double> d = rounded<float>(random_normal(77, 2, 4, 67, 12));
    attn::execution serial;
    CHECK(library_gradients<float>(poisoned(p), d, serial) == library_gradients<float>(p, d, serial));
  }
}

TEST_CASE("pointwise_backward refuses what does not fit", "[pointwise_backward]") {
  const tensor<float> q(2, 4, 6, 8, 0.5f), v(2, 2, 9, 5, 2), k(2, 2, 9, 8, 0.25f), rows(1, 1, 2, 6, 1),
      bias(1, 1, 1, 9);
  tensor<float> d_out(2, 4, 6, 5, 1), dq = q, dk = k, d_rows = rows, d_bias = bias;
  using form = compiled_pointwise<float>;
  attn::execution serial;
  const auto check_message = [&](const char* says, const form::gradients& g, const form::options& o = {},
                                 in_view<float> d = {}) {
    const std::string said = refusal([&] {
      form::backward(view(q), view(k), view(v), {}, d ? d : view(std::as_const(d_out)), g, o, {}, {}, serial);
    });
    INFO(said << " should mention " << says);
    CHECK(said.find(says) != std::string::npos);
    if (*says) CHECK(well_formed(said, "pointwise_backward"));
    if (*says) CHECK((dq == q && dk == k && d_rows == rows && d_bias == bias));
  };
  const auto table = [](auto& x) { return attn::tensor_view<float, 2>(x.data.data(), {x.length(), x.dim()}); };
  check_message("row_weights, since its gradient is asked for; found none", {.row_weights = table(d_rows)});
  check_message("bias, since its gradient is asked for; found none", {.bias = view(d_bias)});
  check_message("the gradient of row_weights of the shape of row_weights [2, 6]; found [1, 12]",
                {.row_weights = attn::tensor_view<float, 2>(d_rows.data.data(), {1, 12})},
                {.row_weights = table_view(rows)});
  check_message("the gradient of q of the shape of q", {.q = view(dk)});
  check_message("overlap", {.q = view(dq), .row_weights = attn::tensor_view<float, 2>(dq.data.data(), {2, 6})},
                {.row_weights = table_view(rows)});
  check_message("d_out of the shape of the result", {.q = view(dq)}, {}, view(q));
  check_message("left >= 0; found -1", {.q = view(dq)}, {.left = -1});
  check_message("", {.q = view(dq), .k = view(dk), .row_weights = table(d_rows)}, {.row_weights = table_view(rows)});
}

}  // namespace testing::pointwise_backward_tests
