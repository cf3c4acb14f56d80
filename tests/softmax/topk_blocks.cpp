// topk_blocks against its reference: every option alone and in combination, odd lengths and blocks, all types; ties,
// keys that are not numbers, choices that all queries share.
#include "support/catch.hpp"
#include "support/pairwise.hpp"
#include "support/run_topk_blocks.hpp"

namespace testing {
namespace {

reference::result wanted_of(const topk_blocks_problem& p) {
  return reference::topk_blocks(p.q, p.k, p.v, p.options);
}

template <class S>
void check(const topk_blocks_problem& given, bool chosen_by_numbers = true) {
  const topk_blocks_problem p = rounded<S>(given);
  if (chosen_by_numbers) REQUIRE(reference::topk_gap(p.q, p.k, p.options) > 1e-6);  // not by rounding
  const reference::result actual = run_pattern<S>(p), wanted = wanted_of(p);
  CHECK(relative_error(actual.out, wanted.out) <= tolerance<S>::out);
  CHECK(relative_error(actual.lse, wanted.lse) <= tolerance<S>::lse);
}

template <class S>
void check_choice(int choice, index queries, index keys, index block, index topk, std::uint64_t seed) {
  CAPTURE(choice, queries, keys, block, topk);
  const problem_shape shape{.queries = queries, .keys = keys, .dim = 9, .value_dim = 12};
  topk_blocks_problem p = topk_problem(shape, block, topk, seed);
  choose(p.options, choice, queries, keys);
  check<S>(p);
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("topk_blocks: every combination of options", "[topk_blocks]", exact_types) {
  for (int choice = 0; choice < 64; choice += 2) {  // it is always causal
    check_choice<TestType>(choice, 40, 40, 4, 3, 1);
    check_choice<TestType>(choice, 25, 38, 5, 2, 1);
    check_choice<TestType>(choice, 38, 25, 3, 4, 1);
  }
}

TEMPLATE_LIST_TEST_CASE("topk_blocks: 16-bit storage computes in float", "[topk_blocks]", storage_types) {
  check<TestType>(topk_problem({.queries = 257, .keys = 257, .dim = 33, .value_dim = 64}, 16, 3));
  for (int choice = 0; choice < 64; choice += 2)
    if (!(choice & 10)) check_choice<TestType>(choice, 21, 21, 4, 3, 3);
}

TEMPLATE_LIST_TEST_CASE("topk_blocks: odd lengths, dims and blocks", "[topk_blocks]", exact_types) {
  const index lengths[] = {0, 1, 2, 7, 16, 63, 64, 65, 127, 130, 257}, dims[] = {1, 3, 8, 16, 33, 64, 80, 128};
  const std::array<index, 2> settings[] = {{1, 4}, {5, 2}, {16, 3}, {7, 1}, {32, 5}, {64, 2}, {13, 300}, {1000, 3}};
  for (std::size_t n = 0; n < std::size(lengths); ++n)
    for (std::size_t w = 0; w < std::size(settings); ++w) {
      problem_shape shape{.queries = lengths[n], .keys = lengths[n]};
      if (n % 3 == 0) shape.kv_heads = 4;
      if (n % 3 == 1) shape.kv_heads = 1;
      shape.dim = dims[(n + w) % 8], shape.value_dim = dims[(n + 3 * w) % 8];
      CAPTURE(shape.queries, shape.dim, shape.value_dim, w);
      check<TestType>(topk_problem(shape, settings[w][0], settings[w][1], n + 4));
    }
}

TEMPLATE_LIST_TEST_CASE("topk_blocks: queries and keys of different lengths", "[topk_blocks]", exact_types) {
  const std::array<index, 2> pairs[] = {{1, 300},  {2, 129}, {48, 49}, {5, 1},   {300, 1},
                                        {129, 60}, {0, 9},   {9, 0},   {77, 530}};
  for (auto [queries, keys] : pairs) {
    CAPTURE(queries, keys);
    check<TestType>(topk_problem({.queries = queries, .keys = keys, .dim = 20, .value_dim = 24}, 11, 3));
  }
}

TEMPLATE_LIST_TEST_CASE("topk_blocks: no heads, no channels, no items", "[topk_blocks]", exact_types) {
  for (int none = 0; none < 4; ++none) {
    problem_shape shape{.queries = 30, .keys = 30};
    if (none == 0) shape.batch = 0;
    if (none == 1) shape.heads = shape.kv_heads = 0;
    if (none == 2) shape.dim = 0;
    if (none == 3) shape.value_dim = 0;
    CAPTURE(none);
    topk_blocks_problem p = topk_problem(shape, 8, 2);
    p.options.scale = 1;
    check<TestType>(p, none != 2);
  }
}

TEMPLATE_LIST_TEST_CASE("topk_blocks: huge numbers do not overflow", "[topk_blocks]", exact_types) {
  const index most = std::numeric_limits<index>::max();
  for (auto [block, topk] : {std::array<index, 2>{most, 3}, {3, most}, {most, most}})
    for (index queries : {60, 90, 110}) {
      CAPTURE(block, topk, queries);
      check<TestType>(topk_problem({.queries = queries, .keys = 90}, block, topk));
    }
}

TEMPLATE_LIST_TEST_CASE("topk_blocks: the promised accuracy at length 4096", "[topk_blocks][long]", exact_types) {
  const problem_shape shape{
      .batch = 1, .heads = 2, .kv_heads = 1, .queries = 4096, .keys = 4096, .dim = 64, .value_dim = 64};
  check<TestType>(topk_problem(shape, 128, 3, 2));
}

TEMPLATE_LIST_TEST_CASE("topk_blocks: more candidates than are compared at a time", "[topk_blocks]", exact_types) {
  const problem_shape shape{.batch = 1, .heads = 1, .kv_heads = 1, .queries = 900, .keys = 900, .dim = 3};
  check<TestType>(topk_problem(shape, 1, 3, 1));
  check<TestType>(topk_problem(shape, 2, 40, 1));
  check<TestType>(topk_problem(shape, 1, 500, 1));
}

TEMPLATE_LIST_TEST_CASE("topk_blocks: of equal matches the earlier block", "[topk_blocks]", exact_types) {
  // Small integers, whose sums are exact: matches are equal or differ by an eighth at least.
  topk_blocks_problem p = topk_problem({.queries = 200, .keys = 200, .dim = 4}, 8, 4);
  random_source random(3);
  for (double& x : p.q.data) x = static_cast<double>(random.below(3)) - 1;
  for (double& x : p.k.data) x = static_cast<double>(random.below(3)) - 1;
  CHECK(reference::topk_gap(p.q, p.k, p.options) == 0);
  check<TestType>(p, false);
  std::fill(p.k.data.begin(), p.k.data.end(), 1.0);  // all are equal
  check<TestType>(p, false);
  std::fill(p.q.data.begin(), p.q.data.end(), 0.0);
  check<TestType>(p, false);
}

TEST_CASE("topk_blocks: a block whose match is not a number comes last", "[topk_blocks]") {
  topk_blocks_problem p =
      topk_problem({.batch = 1, .heads = 1, .kv_heads = 1, .queries = 90, .keys = 90}, 10, 3);
  p.k(0, 0, 14, 3) = std::numeric_limits<double>::quiet_NaN();  // of block 1
  const reference::result actual = run_pattern<float>(p), wanted = wanted_of(p);
  index numbers = 0;
  for (index i = 0; i < 90; ++i) {
    CAPTURE(i);
    const bool nan = std::isnan(wanted.out(0, 0, i, 0));
    CHECK(nan == (i >= 14 && i < 30));  // its own block, and where it is one of two
    CHECK(std::isnan(actual.out(0, 0, i, 0)) == nan);
    if (!nan) numbers += std::abs(actual.out(0, 0, i, 0) - wanted.out(0, 0, i, 0)) < 1e-5;
  }
  CHECK(numbers == 74);
}

TEST_CASE("topk_blocks: a block that all queries choose, on any number of threads", "[topk_blocks]") {
  topk_blocks_problem p =
      topk_problem({.batch = 1, .heads = 2, .kv_heads = 1, .queries = 1500, .keys = 1500, .dim = 8}, 16, 3);
  for (index j = 32; j < 48; ++j)
    for (index d = 0; d < 8; ++d) p.k(0, 0, j, d) = d == 0 ? 40 : 0;
  for (index h = 0; h < 2; ++h)
    for (index i = 0; i < 1500; ++i) p.q(0, h, i, 0) = 1 + 0.1 * std::abs(p.q(0, h, i, 0));
  check<float>(p);
  attn::execution three(3, 0), eight(8, 0);
  const reference::result serial = run_pattern<float>(p);
  for (attn::execution* threads : {&three, &eight}) {
    const reference::result shared = run_pattern<float>(p, *threads);
    CHECK(shared.out == serial.out);
    CHECK(shared.lse == serial.lse);
  }
}

}  // namespace testing
