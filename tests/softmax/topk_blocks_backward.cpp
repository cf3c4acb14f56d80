// The gradients of topk_blocks against the reverse pass of its reference: options in all pairs, odd lengths, all types.
#include "support/pairwise.hpp"
#include "support/run_topk_blocks.hpp"

namespace testing {
namespace {

struct choice {
  bool softcap, alibi, sinks, score, lengths, d_lse, saved_lse;
  index kv_heads;
  int blocks;  // which of some sizes and numbers
};

std::vector<choice> choices() {
  std::vector<choice> drawn;
  random_source random(7);
  for (int n = 0; n < 400; ++n) {
    const auto flag = [&random] { return random.below(2) == 1; };
    choice c;
    c.softcap = flag(), c.alibi = flag(), c.sinks = flag(), c.score = flag(), c.lengths = flag(), c.d_lse = flag();
    c.saved_lse = flag(), c.kv_heads = index(1) << random.below(3), c.blocks = static_cast<int>(random.below(4));
    drawn.push_back(c);
  }
  return selected(
      drawn,
      [](const choice& c) {
        return std::array{+c.softcap, +c.alibi,     +c.sinks,        +c.score, +c.lengths,
                          +c.d_lse,   +c.saved_lse, int(c.kv_heads), c.blocks};
      },
      true);
}

constexpr std::array<index, 2> sizes[] = {{4, 3}, {5, 2}, {7, 1}, {3, 100}};

topk_blocks_problem apply(const choice& c, index queries, index keys) {
  const auto [block, topk] = sizes[c.blocks];
  topk_blocks_problem p = topk_problem(
      {.kv_heads = c.kv_heads, .queries = queries, .keys = keys, .dim = 9, .value_dim = 12}, block, topk, 2);
  auto& o = p.options;
  if (c.softcap) o.softcap = 1.5;
  if (c.alibi) o.alibi_slopes = {0.5, 0.25, 0.125, 0};
  if (c.sinks) o.sinks = {0.3, -1, 2, -reference::infinity};
  if (c.score) o.score = smooth_score{};
  if (c.lengths) o.scale = 0.4, o.query_lengths = {queries, queries / 2}, o.key_lengths = {keys / 3, keys - 1};
  return p;
}

template <class S>
void check(const topk_blocks_problem& p, bool d_lse, bool saved_lse, attn::execution* exec = nullptr) {
  const auto given = rounded<S>(p);
  REQUIRE(reference::topk_gap(given.q, given.k, given.options) > 1e-6);  // rounding does not choose
  check_backward<S>(p, d_lse, {.saved_lse = saved_lse}, exec);
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("topk_blocks_backward: options in all pairs", "[topk_blocks_backward]", exact_types) {
  for (const choice& c : choices()) {
    CAPTURE(c.softcap, c.alibi, c.sinks, c.score, c.lengths, c.d_lse, c.saved_lse, c.kv_heads, c.blocks);
    check<TestType>(apply(c, 35, 35), c.d_lse, c.saved_lse);
    check<TestType>(apply(c, 21, 35), c.d_lse, c.saved_lse);
    check<TestType>(apply(c, 30, 13), c.d_lse, c.saved_lse);
  }
}

TEMPLATE_LIST_TEST_CASE("topk_blocks_backward: 16-bit storage computes in float", "[topk_blocks_backward]",
                        storage_types) {
  for (const choice& c : choices()) check<TestType>(apply(c, 17, 17), c.d_lse, c.saved_lse);
}

TEMPLATE_LIST_TEST_CASE("topk_blocks_backward: odd lengths and dims", "[topk_blocks_backward]", exact_types) {
  const std::array<index, 2> pairs[] = {{0, 0},   {1, 1}, {2, 2},    {63, 63}, {65, 65}, {130, 130},
                                        {1, 300}, {5, 1}, {129, 60}, {0, 9},   {9, 0},   {48, 131}};
  const index dims[] = {1, 3, 16, 33, 64};
  constexpr std::array<index, 2> blocks[] = {{1, 3}, {16, 2}, {9, 4}, {1000, 2}};
  attn::execution three(3, 0);
  for (std::size_t n = 0; n < std::size(pairs); ++n)
    for (std::size_t w = 0; w < std::size(blocks); ++w) {
      const auto [queries, keys] = pairs[n];
      problem_shape shape{.batch = 1, .heads = 4, .kv_heads = 2, .queries = queries, .keys = keys};
      shape.dim = dims[(n + w) % 5], shape.value_dim = dims[(n + 2 * w + 1) % 5];
      if (keys > 65 || keys == 1) shape.dim = n % 2 ? 3 : 9, shape.value_dim = n % 2 ? 8 : 5;
      CAPTURE(queries, keys, shape.dim, shape.value_dim, w);
      check<TestType>(topk_problem(shape, blocks[w][0], blocks[w][1], n + 1), true, true, w % 2 ? &three : nullptr);
    }
}

TEMPLATE_LIST_TEST_CASE("topk_blocks_backward: gradients added, and each alone", "[topk_blocks_backward]",
                        exact_types) {
  for (int blocks : {0, 3}) {
    check_accumulate<TestType>(apply({true, true, true, true, true, true, true, 2, blocks}, 35, 35));
    check_each_alone<TestType>(apply({false, true, true, false, false, true, true, 2, blocks}, 35, 35));
  }
}

// Long enough for sums of dK and dV in several parts.
TEMPLATE_LIST_TEST_CASE("topk_blocks_backward: several parts, on any number of threads", "[topk_blocks_backward]",
                        exact_types) {
  const topk_blocks_problem p = rounded<TestType>(topk_problem(
      {.batch = 1, .heads = 2, .kv_heads = 1, .queries = 4200, .keys = 4200, .dim = 3, .value_dim = 2}, 50, 2, 3));
  REQUIRE(reference::topk_gap(p.q, p.k, p.options) > 1e-6);
  const gradient_case c = case_of(p, false);
  const tensors d = {rounded<TestType>(random_normal(9, 1, 2, 4200, 2))};
  const named_tensors serial = library_gradients<TestType>(p, c, d);
  attn::execution three(3, 0);
  CHECK(library_gradients<TestType>(p, c, d, {}, three) == serial);

  // Weights sum up to 1, so gradients of values sum up to those of out.
  for (index e = 0; e < 2; ++e) {
    double values = 0, results = 0;
    for (index j = 0; j < 4200; ++j) values += serial.at("v")(0, 0, j, e);
    for (index h = 0; h < 2; ++h)
      for (index i = 0; i < 4200; ++i) results += d[0](0, h, i, e);
    CHECK(std::abs(values - results) <= 1e-2);
  }
}

}  // namespace testing
