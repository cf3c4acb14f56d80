// The gradients of topk_blocks against the reverse pass of its reference: options in all pairs, odd lengths and blocks,
// all types.
#include "support/pairwise.hpp"
#include "support/run_pattern_backward.hpp"
#include "support/run_topk_blocks.hpp"

namespace testing::topk_blocks_backward_tests {
namespace {

constexpr idx_t huge = idx_t(1) << 62;

struct setting {
  idx_t block, topk;
};
constexpr setting settings[] = {{4, 3}, {1, 2}, {6, 100}, {7, 2}};

struct choice {
  bool softcap, alibi, sinks, score, lengths, d_lse, saved_lse;
  idx_t kv_heads;
  int blocks;  // which setting
};

std::vector<choice> choices() {
  std::vector<choice> drawn;
  random_source random(13);
  for (int n = 0; n < 400; ++n) {
    const auto flag = [&random] { return random.below(2) == 1; };
    choice c;
    c.softcap = flag(), c.alibi = flag(), c.sinks = flag(), c.score = flag(), c.lengths = flag();
    c.d_lse = flag(), c.saved_lse = flag();
    c.kv_heads = idx_t(1) << random.below(3), c.blocks = static_cast<int>(random.below(std::ssize(settings)));
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

template <class S>
topk_problem apply(const choice& c, idx_t queries, idx_t keys, idx_t dim = 9, idx_t value_dim = 12,
                   double least_gap = 1e-6) {
  reference::topk_blocks_options o;
  o.block = settings[c.blocks].block, o.topk = settings[c.blocks].topk;
  if (c.softcap) o.softcap = 1.5;
  if (c.alibi) o.alibi_slopes = {0.5, 0.25, 0.125, 0};
  if (c.sinks) o.sinks = {0.3, -1, 2, -reference::infinity};
  if (c.score) o.score = smooth_score{};
  if (c.lengths) o.scale = 0.4, o.query_lengths = {queries, queries / 2}, o.key_lengths = {keys / 3, keys - 1};
  const problem_shape shape{
      .kv_heads = c.kv_heads, .queries = queries, .keys = keys, .dim = dim, .value_dim = value_dim};
  return topk_of<S>(shape, o, 1, least_gap);
}

template <class S>
void check_choices(idx_t queries, idx_t keys) {
  for (const choice& c : choices()) {
    CAPTURE(c.softcap, c.alibi, c.sinks, c.score, c.lengths, c.d_lse, c.saved_lse, c.kv_heads, c.blocks);
    check_backward<S>(apply<S>(c, queries, keys), c.d_lse, {.saved_lse = c.saved_lse});
  }
}

// The gradients are those of the reference, and the same bits for any number of threads.
template <class S>
void check_threads(const topk_problem& p) {
  const gradient_case c = case_of(p, true);
  const reference_gradients wanted = gradients_of(c, round_results<S>);
  attn::execution serial, two(2, 0), three(3, 0);
  const named_tensors alone = library_gradients<S>(p, c, wanted.d_results, {}, serial);
  for (std::size_t n = 0; n < c.names.size(); ++n) {
    INFO("gradient of " << c.names[n]);
    CHECK(relative_error(alone.at(c.names[n]), wanted.gradients[n]) <=
          gradient_factor<S>(c.names[n]) * product_gradient_tolerance<S>);
  }
  for (attn::execution* threads : {&two, &three})
    CHECK(library_gradients<S>(p, c, wanted.d_results, {}, *threads) == alone);
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("topk_blocks_backward: options in all pairs", "[topk_blocks_backward]", exact_types) {
  check_choices<TestType>(35, 35);
  check_choices<TestType>(21, 35);
  check_choices<TestType>(30, 13);
}

TEMPLATE_LIST_TEST_CASE("topk_blocks_backward: 16-bit storage computes in float", "[topk_blocks_backward]",
                        storage_types) {
  check_choices<TestType>(17, 23);
}

TEST_CASE("topk_blocks_backward: the reverse pass agrees with central differences", "[topk_blocks_backward]") {
  // The step must not change a choice.
  for (const choice& c : choices()) check_central_differences(case_of(apply<double>(c, 13, 13, 3, 4, 1e-3), c.d_lse));
}

TEMPLATE_LIST_TEST_CASE("topk_blocks_backward: odd lengths, dims and blocks", "[topk_blocks_backward]", exact_types) {
  const std::array<idx_t, 2> both_lengths[] = {{0, 0},   {1, 1},    {2, 2},   {7, 7},     {16, 16},
                                               {63, 63}, {64, 64},  {65, 65}, {130, 130}, {1, 300},
                                               {5, 1},   {129, 60}, {0, 9},   {9, 0},     {48, 131}};
  const idx_t dims[] = {1, 3, 16, 33, 64};
  const setting given[] = {{1, 3}, {5, 3}, {16, 2}, {16, 1}, {64, 2}, {1000, 3}, {huge, huge}};
  attn::execution three(3, 0);
  for (std::size_t n = 0; n < std::size(both_lengths); ++n)
    for (std::size_t w = 0; w < std::size(given); ++w) {
      const auto [queries, keys] = both_lengths[n];
      if (queries > 65 && w % 2 != n % 2) continue;
      problem_shape shape{.batch = 1, .heads = 4, .kv_heads = 2, .queries = queries, .keys = keys};
      shape.dim = dims[(n + w) % 5], shape.value_dim = dims[(n + 2 * w + 1) % 5];
      if (keys > 65) shape.dim = 5, shape.value_dim = 8;
      if (keys == 1) shape.value_dim = lone_key_value_dim;
      reference::topk_blocks_options o;
      o.block = given[w].block, o.topk = given[w].topk;
      CAPTURE(queries, keys, shape.dim, shape.value_dim, o.block, o.topk);
      check_backward<TestType>(topk_of<TestType>(shape, o, n + 1), true, {}, w % 2 ? &three : nullptr);
    }
}

TEMPLATE_LIST_TEST_CASE("topk_blocks_backward: long sequences, with and without threads", "[topk_blocks_backward]",
                        exact_types) {
  reference::topk_blocks_options o;
  o.block = 16, o.topk = 2, o.alibi_slopes = {0.01, 0.02}, o.sinks = {0.5, 1};
  const problem_shape shape{
      .batch = 1, .heads = 2, .kv_heads = 1, .queries = 4500, .keys = 4500, .dim = 2, .value_dim = 3};
  check_threads<TestType>(topk_of<TestType>(shape, o));
}

TEMPLATE_LIST_TEST_CASE("topk_blocks_backward: one block that all queries choose, with and without threads",
                        "[topk_blocks_backward]", exact_types) {
  // Queries share a direction, which the keys of block 0 have.
  topk_problem p = random_problem<topk_problem>(
      {.batch = 2, .heads = 4, .kv_heads = 2, .queries = 1150, .keys = 1150, .dim = 6, .value_dim = 4});
  p.options.block = 32, p.options.topk = 2, p.options.lengths = {1150, 300};
  for (double& x : p.q.data) x = 0.1 * x + 0.5;
  for (idx_t b = 0; b < 2; ++b)
    for (idx_t h = 0; h < 2; ++h)
      for (idx_t j = 0; j < 32; ++j)
        for (idx_t d = 0; d < 6; ++d) p.k(b, h, j, d) += 3;
  p.q = rounded<TestType>(p.q), p.k = rounded<TestType>(p.k), p.v = rounded<TestType>(p.v);
  REQUIRE(reference::topk_gap(p.q, p.k, p.options) > 1e-3);
  check_threads<TestType>(p);
}

TEMPLATE_LIST_TEST_CASE("topk_blocks_backward: gradients added, and each alone", "[topk_blocks_backward]",
                        exact_types) {
  for (int blocks = 0; blocks < 4; ++blocks) {
    CAPTURE(blocks);
    check_accumulate<TestType>(apply<TestType>({true, true, true, true, true, true, true, 2, blocks}, 35, 35));
    check_each_alone<TestType>(apply<TestType>({false, true, true, false, true, true, true, 2, blocks}, 35, 35));
  }
}

}  // namespace testing::topk_blocks_backward_tests
