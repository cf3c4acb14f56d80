// bigbird against its reference: every option alone and in combination, odd lengths and blocks, all types; the helper
// that draws random blocks.
#include <set>

#include "support/catch.hpp"
#include "support/refusal.hpp"
#include "support/run_pattern.hpp"

namespace testing::bigbird_tests {
namespace {

using bigbird_problem = problem<reference::bigbird_options>;

struct setting {
  idx_t size, window, globals, random;
};

bigbird_problem problem_of(const problem_shape& shape, const setting& s, idx_t table_heads, std::uint64_t seed = 1) {
  bigbird_problem p = random_problem<bigbird_problem>(shape, seed);
  p.options.size = s.size, p.options.window_blocks = s.window, p.options.global_blocks = s.globals;
  p.options.random = block_table(0, table_heads, shape.keys / s.size + (shape.keys % s.size != 0), s.random);
  return p;
}

template <class S>
void check(const bigbird_problem& p) {
  const errors e = pattern_errors<S>(p);
  CHECK(e.out <= tolerance<S>::out);
  CHECK(e.lse <= tolerance<S>::lse);
}

template <class S>
void check_choice(int choice, idx_t queries, idx_t keys, const setting& s, idx_t table_heads) {
  CAPTURE(choice, queries, keys, s.size, s.window, s.globals, s.random, table_heads);
  bigbird_problem p = problem_of({.queries = queries, .keys = keys, .dim = 9, .value_dim = 12}, s, table_heads);
  choose_of_pattern(p.options, choice, queries, keys);
  check<S>(p);
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("bigbird: every combination of options", "[bigbird]", exact_types) {
  for (int choice = 0; choice < 64; ++choice)
    for (setting s : {setting{4, 3, 1, 2}, {3, 1, 0, 1}, {2, 5, 2, 0}}) {
      check_choice<TestType>(choice, 40, 40, s, 4);
      check_choice<TestType>(choice, 25, 38, s, 1);
      check_choice<TestType>(choice, 38, 25, s, 4);
    }
}

TEMPLATE_LIST_TEST_CASE("bigbird: 16-bit storage computes in float", "[bigbird]", storage_types) {
  check<TestType>(problem_of({.queries = 257, .keys = 257, .dim = 33, .value_dim = 64}, {16, 3, 1, 3}, 4));
  for (int choice = 0; choice < 64; ++choice)
    if (!(choice & 10)) check_choice<TestType>(choice, 21, 21, {2, 3, 1, 1}, 4);
}

TEMPLATE_LIST_TEST_CASE("bigbird: odd lengths, dims and blocks", "[bigbird]", exact_types) {
  const idx_t lengths[] = {0, 1, 2, 7, 16, 63, 64, 65, 127, 130, 257}, dims[] = {1, 3, 8, 16, 33, 64, 80, 128};
  const setting settings[] = {{1, 1, 0, 1},  {7, 3, 1, 3},  {16, 3, 0, 2},   {32, 1, 1, 1},
                              {13, 3, 3, 0}, {64, 3, 1, 3}, {1000, 3, 1, 1}, {5, 99, 1, 1}};
  for (std::size_t n = 0; n < std::size(lengths); ++n)
    for (std::size_t w = 0; w < std::size(settings); ++w) {
      problem_shape shape{.queries = lengths[n], .keys = lengths[n]};
      shape.dim = dims[(n + w) % 8], shape.value_dim = dims[(n + 3 * w) % 8];
      bigbird_problem p = problem_of(shape, settings[w], 4, n + 1);
      p.options.causal = (n + w) % 2;
      CAPTURE(shape.queries, shape.dim, shape.value_dim, w, p.options.causal);
      check<TestType>(p);
    }
}

TEMPLATE_LIST_TEST_CASE("bigbird: queries and keys of different lengths", "[bigbird]", exact_types) {
  const std::array<idx_t, 2> both_lengths[] = {{1, 300},  {2, 129}, {48, 49}, {5, 1},   {300, 1},
                                        {129, 60}, {0, 9},   {9, 0},   {77, 530}};
  for (auto [queries, keys] : both_lengths)
    for (bool causal : {false, true}) {
      bigbird_problem p = problem_of({.queries = queries, .keys = keys, .dim = 20, .value_dim = 24}, {11, 3, 1, 2}, 4);
      p.options.causal = causal;
      CAPTURE(queries, keys, causal);
      check<TestType>(p);
    }
}

TEMPLATE_LIST_TEST_CASE("bigbird: huge numbers do not overflow", "[bigbird]", exact_types) {
  const idx_t most = std::numeric_limits<idx_t>::max();
  for (setting s : {setting{most, 3, 1, 0}, {3, most, 0, 1}, {3, 1, most, 1}, {most, most, most, 1}})
    for (idx_t queries : {60, 90, 110}) {
      CAPTURE(s.size, s.window, s.globals, queries);
      check<TestType>(problem_of({.queries = queries, .keys = 90}, s, 1));
    }
}

TEMPLATE_LIST_TEST_CASE("bigbird: the promised accuracy at length 4096", "[bigbird][long]", exact_types) {
  const problem_shape shape{
      .batch = 1, .heads = 2, .kv_heads = 1, .queries = 4096, .keys = 4096, .dim = 64, .value_dim = 64};
  check<TestType>(problem_of(shape, {64, 3, 1, 3}, 2));
}

TEST_CASE("bigbird: random blocks are different, and none that is seen anyway", "[bigbird]") {
  for (bool causal : {false, true})
    for (idx_t blocks : {0, 1, 3, 8, 40})
      for (idx_t count : {0, 1, 3, 60}) {
        const auto drawn = attn::draw_random_blocks(blocks, count, {.seed = 5, .heads = 3, .causal = causal});
        const auto table = drawn.view();
        REQUIRE(table.extents() == std::array<idx_t, 3>{3, blocks, count});
        for (idx_t h = 0; h < 3; ++h)
          for (idx_t a = 0; a < blocks; ++a) {
            std::set<idx_t> candidates, row;
            for (idx_t c = 1; c + 1 < blocks; ++c)
              if (c < a - 1 || (c > a + 1 && !causal)) candidates.insert(c);
            idx_t none = 0;
            for (idx_t n = 0; n < count; ++n) table(h, a, n) == -1 ? void(++none) : void(row.insert(table(h, a, n)));
            CHECK(std::includes(candidates.begin(), candidates.end(), row.begin(), row.end()));
            CHECK(std::ssize(row) == std::min(count, std::ssize(candidates)));
            CHECK(std::ssize(row) + none == count);
          }
      }
}

TEST_CASE("bigbird: random blocks are drawn evenly, and the same for the same seed", "[bigbird]") {
  const auto drawn = attn::draw_random_blocks(12, 3, {.seed = 1, .heads = 2000});
  const auto table = drawn.view();
  std::vector<idx_t> hits(12);
  for (idx_t h = 0; h < 2000; ++h)
    for (idx_t n = 0; n < 3; ++n) ++hits[static_cast<std::size_t>(table(h, 5, n))];
  for (idx_t a : {1, 2, 3, 7, 8, 9, 10}) {
    const double expected = 2000 * 3 / 7.0;  // four standard deviations of a binomial
    CHECK(std::abs(static_cast<double>(hits[static_cast<std::size_t>(a)]) - expected) < 4 * std::sqrt(expected));
  }
  const auto again = attn::draw_random_blocks(12, 3, {.seed = 1}),
             other = attn::draw_random_blocks(12, 3, {.seed = 2});
  const auto same = again.view(), different = other.view();
  bool equal = true, all = true;
  for (idx_t a = 0; a < 12; ++a)
    for (idx_t n = 0; n < 3; ++n)
      equal = equal && same(0, a, n) == table(0, a, n), all = all && different(0, a, n) == table(0, a, n);
  CHECK(equal);
  CHECK(!all);
  // the numbers themselves: the same on every machine
  const std::vector<idx_t> first(&same(0, 5, 0), &same(0, 5, 0) + 3);
  CHECK(first == std::vector<idx_t>{1, 7, 10});
}

TEST_CASE("bigbird: tables that cannot be drawn are refused", "[bigbird]") {
  CHECK(well_formed(refusal([] { attn::draw_random_blocks(4, 1, {.heads = -1}); }), "draw_random_blocks"));
  CHECK(well_formed(refusal([] { attn::draw_random_blocks(-4, 1); }), "draw_random_blocks"));
  CHECK(well_formed(refusal([] { attn::draw_random_blocks(4, -1); }), "draw_random_blocks"));
  CHECK(well_formed(refusal([] { attn::draw_random_blocks(4, 1, {.window_blocks = 0}); }), "draw_random_blocks"));
  CHECK(well_formed(refusal([] { attn::draw_random_blocks(4, 1, {.global_blocks = -1}); }), "draw_random_blocks"));
  CHECK(well_formed(refusal([] { attn::draw_random_blocks(1 << 30, 1 << 30, {.heads = 1 << 30}); }),
                    "draw_random_blocks"));
}

}  // namespace testing::bigbird_tests
