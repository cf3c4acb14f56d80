// Few queries over many keys, as in the steps of a cache: by the streaming kernel, or by packed blocks of keys, in
// chunks that are merged.
#include <attn/softmax/full_softmax_step.hpp>

#include "support/catch.hpp"
#include "support/run.hpp"

namespace testing::few_queries_tests {
namespace {

constexpr idx_t many_keys = 2048 + 256 + 33;  // two chunks; blocks and panels that are not whole

full_softmax_problem problem_of(idx_t queries, idx_t heads, idx_t kv_heads, idx_t keys = many_keys) {
  return random_problem<full_softmax_problem>({.batch = 1,
                                               .heads = heads,
                                               .kv_heads = kv_heads,
                                               .queries = queries,
                                               .keys = keys,
                                               .dim = 24,
                                               .value_dim = 20});
}

template <class S>
void check(const full_softmax_problem& p) {
  const auto [out, lse] = errors_of<S>(p);
  CHECK(out <= tolerance<S>::out);
  CHECK(lse <= tolerance<S>::lse);
}

const auto groups = {std::pair<idx_t, idx_t>{2, 2}, {6, 2}, {4, 1}};

}  // namespace

TEMPLATE_LIST_TEST_CASE("few queries: any number, in any group", "[few_queries]", all_types) {
  for (auto [heads, kv_heads] : groups)
    for (idx_t queries : {1, 4, 5, 7, 9, 17, 63, 65}) {
      CAPTURE(heads, kv_heads, queries);
      full_softmax_problem p = problem_of(queries, heads, kv_heads, queries == 17 ? 300 : many_keys);
      p.options.causal = queries != 9;
      check<TestType>(p);
    }
}

// Tiles of several heads have terms of each.
TEMPLATE_LIST_TEST_CASE("few queries: every option is that of its head", "[few_queries]", all_types) {
  for (idx_t queries : {3, 7}) {
    full_softmax_problem p = problem_of(queries, 6, 2, 530);
    p.options.causal = true;
    const auto with = [&](auto&& set) {
      full_softmax_problem one = p;
      set(one.options);
      check<TestType>(one);
    };
    with([&](auto& o) { o.bias = random_normal(4, 1, 6, queries, 530); });
    with([](auto& o) { o.alibi_slopes = {0.5, 0.25, 0.125, 0, 0.03, 0.7}; });
    with([](auto& o) { o.sinks = {0.3, -1, 2, 0, 5, -3}, o.softcap = 1.5; });
    with([](auto& o) { o.relative_bias = random_normal(5, 1, 1, 6, 2 * 40 + 1); });
    with([](auto& o) { o.relative_keys = random_normal(6, 1, 6, 2 * 40 + 1, 24); });
    with([](auto& o) { o.key_mask = random_key_mask(7, 1, 530); });
    with([](auto& o) { o.dropout_rate = 0.3, o.dropout_seed = 5; });
    with([](auto& o) {
      o.score = [](double s, idx_t, idx_t h, idx_t i, idx_t j) {
        return (i + 2 * j + h) % 7 == 0 ? -reference::infinity : s;
      };
    });
  }
}

TEMPLATE_LIST_TEST_CASE("few queries: threads, other heads and unseen keys change no bit", "[few_queries]", all_types) {
  attn::execution two(2, 0);
  for (auto [heads, kv_heads] : groups)
    for (idx_t queries : {2, 5, 13, 64}) {
      CAPTURE(heads, kv_heads, queries);
      full_softmax_problem p = problem_of(queries, heads, kv_heads);
      p.options.causal = true, p.options.first_position = many_keys - 150;
      const reference::result all = run<TestType>(p);
      const reference::result by_two = run<TestType>(p, two);
      CHECK(by_two.out.data == all.out.data);
      CHECK(by_two.lse.data == all.lse.data);

      full_softmax_problem one = problem_of(queries, 1, 1);  // the last head alone
      one.options = p.options;
      const auto copy = [](const tensor<double>& from, tensor<double>& to) {
        for (idx_t i = 0; i < to.length(); ++i)
          for (idx_t d = 0; d < to.dim(); ++d) to(0, 0, i, d) = from(0, from.heads() - 1, i, d);
      };
      copy(p.q, one.q), copy(p.k, one.k), copy(p.v, one.v);
      tensor<double> last(1, 1, queries, 20);
      copy(all.out, last);
      CHECK(run<TestType>(one).out.data == last.data);

      for (idx_t h = 0; h < kv_heads; ++h)
        for (idx_t j = many_keys - 150 + queries; j < many_keys; ++j)
          for (idx_t d = 0; d < 20; ++d)
            p.k(0, h, j, d) = p.v(0, h, j, d) = std::numeric_limits<double>::quiet_NaN();
      CHECK(run<TestType>(p, two).out.data == all.out.data);

      // The last query sees a value that is not finite, and the others, in the same tile, do not.
      p.v(0, kv_heads - 1, many_keys - 150 + queries - 1, 3) = std::numeric_limits<double>::quiet_NaN();
      const reference::result poisoned = run<TestType>(p);
      for (idx_t h = 0; h < heads; ++h)
        for (idx_t i = 0; i < queries; ++i)
          for (idx_t d = 0; d < 20; ++d) {
            const bool sees = i + 1 == queries && d == 3 && h / (heads / kv_heads) == kv_heads - 1;
            REQUIRE((sees ? std::isnan(poisoned.out(0, h, i, d)) : poisoned.out(0, h, i, d) == all.out(0, h, i, d)));
          }
    }
}

}  // namespace testing::few_queries_tests
