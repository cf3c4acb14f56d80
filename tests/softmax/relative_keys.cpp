// Keys by distance: against biases of every pair, in every kernel, with and without queries of their own.
#include "support/catch.hpp"
#include "support/run_backward.hpp"

namespace testing::relative_keys_tests {
namespace {

constexpr problem_shape shape{.batch = 2, .queries = 40, .keys = 70, .dim = 9, .value_dim = 7};

template <class Problem>
Problem with_keys(const problem_shape& s, idx_t reach, bool one_table, bool own_queries) {
  auto p = random_problem<Problem>(s, 7);
  p.options.relative_keys = random_normal(5, 1, one_table ? 1 : p.q.heads(), 2 * reach + 1, s.dim);
  if (own_queries) p.options.relative_queries = random_normal(6, s.batch, p.q.heads(), s.queries, s.dim);
  return p;
}

}  // namespace

TEST_CASE("relative keys are another product of every pair, within reach and beyond", "[relative_keys]") {
  attn::execution threads(3, 0);
  for (idx_t reach : {0, 3, 50, 400})
    for (idx_t queries : {2, 40, 230})
      for (bool own : {false, true}) {
        CAPTURE(reach, queries, own);
        problem_shape s = shape;
        s.queries = queries, s.keys = std::max<idx_t>(queries, 70);
        auto p = with_keys<full_softmax_problem>(s, reach, reach == 3, own);
        p.options.causal = own, p.options.softcap = reach == 50 ? std::optional<double>(4) : std::nullopt;
        if (reach == 0) p.options.sinks = {0, 1, -1, 2};  // else a key for all pairs has no gradient
        const auto e = errors_of<float>(p);
        CHECK(e.out <= tolerance<float>::out);
        CHECK(e.lse <= tolerance<float>::lse);
        const auto of_bf16 = errors_of<Eigen::bfloat16>(p);
        CHECK(of_bf16.out <= made_keys_tolerance<Eigen::bfloat16>::out);
        if (queries > 40) continue;
        check_backward<float>(p, true);
        check_backward<float>(p, true, {.saved_lse = false}, &threads);
        check_accumulate<float>(p);
        if (reach > 0) check_backward<Eigen::bfloat16>(p);  // else nearly all of the sums over a row's keys cancels
      }
}

TEST_CASE("windows with relative keys, dilated and with global tokens", "[relative_keys]") {
  attn::execution threads(3, 0);
  for (const std::vector<idx_t>& dilation : {std::vector<idx_t>{1}, {1, 3, 2, 1}, {3}})
    for (const std::vector<idx_t>& globals : {std::vector<idx_t>{}, {2, 30, 57}})
      for (bool own : {false, true}) {
        CAPTURE(dilation, globals, own);
        auto p = with_keys<sliding_window_problem>(shape, own ? 5 : 60, !own, own);
        p.options.left = 6, p.options.right = 3, p.options.dilation = dilation, p.options.global_positions = globals;
        p.options.relative_bias = random_normal(8, 1, 1, 4, 2 * 9 + 1);
        const auto e = errors_of<float>(p);
        CHECK(e.out <= tolerance<float>::out);
        check_backward<float>(p, true);
        p.options.score = smooth_score{};
        check_backward<float>(p, true, {}, &threads);
        if (globals.empty() || own) continue;
        p.options.score = {};
        p.options.q_global = random_normal(11, 2, 4, 40, 9), p.options.k_global = random_normal(12, 2, 2, 70, 9),
        p.options.v_global = random_normal(13, 2, 2, 70, 7);
        check_backward<float>(p, true);
      }
}

TEST_CASE("gradients of relative keys alone are what they are with the others", "[relative_keys]") {
  check_each_alone<float>(with_keys<full_softmax_problem>(shape, 20, false, true));
  check_each_alone<float>(with_keys<full_softmax_problem>(shape, 20, true, false));
  auto p = with_keys<sliding_window_problem>(shape, 20, true, true);
  p.options.left = 4, p.options.right = 4, p.options.global_positions = {3};
  check_each_alone<float>(p);
}

TEST_CASE("a relative key or query that is NaN reaches only those that read it", "[relative_keys]") {
  auto p = with_keys<full_softmax_problem>(shape, 20, false, true);
  p.options.causal = true, p.options.lengths = {}, p.options.query_lengths = {40, 30}, p.options.key_lengths = {70, 50};
  for (idx_t d = 0; d < 9; ++d) {
    p.options.relative_keys(0, 1, 25, d) = std::nan("");  // 5 keys ahead, which causal hides
    p.options.relative_queries(1, 2, 35, d) = std::nan("");  // padding
  }
  auto q = p;
  for (double& x : q.options.relative_keys.data) x = std::isnan(x) ? 0 : x;
  for (double& x : q.options.relative_queries.data) x = std::isnan(x) ? 0 : x;
  CHECK(run<float>(p).out == run<float>(q).out);
  const gradient_case c = case_of(q, true), with_nan = case_of(p, true);
  tensors d = random_gradients(c.forward(independent(c.inputs)));
  round_results<float>(d);
  const named_tensors clean = library_gradients<float>(q, c, d), found = library_gradients<float>(p, with_nan, d);
  for (const auto& [name, x] : clean) {
    CAPTURE(name);
    CHECK(relative_error(found.at(name), x) <= 1e-6);
  }
}

TEST_CASE("steps with relative keys are rows of the whole call", "[relative_keys]") {
  const idx_t length = 30;
  const tensor<float> q = cast<float>(random_normal(1, 1, 4, length, 8)),
                      k = cast<float>(random_normal(2, 1, 2, length, 8)),
                      v = cast<float>(random_normal(3, 1, 2, length, 8)),
                      r = cast<float>(random_normal(5, 1, 1, 2 * 11 + 1, 8)),
                      own = cast<float>(random_normal(6, 1, 4, length, 8));
  const attn::tensor_view<const float, 3> table(r.data.data(), {1, r.length(), 8});
  tensor<float> out(1, 4, length, 8), stepped(1, 4, length, 8), wanted(1, 4, length, 8);
  attn::full_softmax(view(q), view(k), view(v), view(wanted),
                     {.causal = true, .relative_keys = table, .relative_queries = view(own)});
  attn::kv_cache<float> cache({.batch = 1, .heads = 2, .dim = 8});
  attn::kv_cache<Eigen::half> small({.batch = 1, .heads = 2, .dim = 8});
  attn::sliding_window_cache<float> ring({.batch = 1, .heads = 2, .dim = 8}, {.left = length});
  for (idx_t t = 0, n; t < length; t += n) {
    n = std::min<idx_t>(t % 7 + 1, length - t);
    const auto part = [&](auto x) { return x.slice(2, t, n); };
    const auto same = [&](const tensor<float>& found, double tolerance) {
      CHECK(relative_error(cast<double>(rows(found, t, n)), cast<double>(rows(wanted, t, n))) <= tolerance);
    };
    attn::full_softmax_step(cache, part(view(q)), part(view(k)), part(view(v)), part(view(out)),
                            {.relative_keys = table, .relative_queries = part(view(own))});
    same(out, 1e-6);
    attn::full_softmax_step(small, part(view(q)), part(view(k)), part(view(v)), part(view(stepped)),
                            {.relative_keys = table, .relative_queries = part(view(own))});
    same(stepped, 2e-3);  // keys and values in half: 2^-11 of them
    attn::sliding_window_step(ring, part(view(q)), part(view(k)), part(view(v)), part(view(stepped)),
                              {.relative_keys = table, .relative_queries = part(view(own))});
    same(stepped, 1e-6);
  }
}

}  // namespace testing::relative_keys_tests
