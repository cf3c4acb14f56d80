// The gradients of selected_keys against the reverse pass of its reference: options in all pairs, lists and blocks of
// all kinds, odd lengths, all types.
#include "support/pairwise.hpp"
#include "support/run_pattern_backward.hpp"
#include "support/run_selected_keys.hpp"

namespace testing::selected_keys_backward_tests {
namespace {

struct setting {
  idx_t block, count;
};
constexpr setting settings[] = {{1, 7}, {3, 4}, {16, 2}, {20, 1}};

struct choice {
  bool causal, softcap, alibi, sinks, score, lengths, d_lse, saved_lse;
  idx_t kv_heads;
  int lists, blocks;  // lists: for all heads, key heads or heads; which setting
};

std::vector<choice> choices() {
  std::vector<choice> drawn;
  random_source random(13);
  for (int n = 0; n < 400; ++n) {
    const auto flag = [&random] { return random.below(2) == 1; };
    choice c;
    c.causal = flag(), c.softcap = flag(), c.alibi = flag(), c.sinks = flag(), c.score = flag(), c.lengths = flag();
    c.d_lse = flag(), c.saved_lse = flag();
    c.kv_heads = idx_t(1) << random.below(3), c.lists = static_cast<int>(random.below(3));
    c.blocks = static_cast<int>(random.below(std::ssize(settings)));
    drawn.push_back(c);
  }
  return selected(
      drawn,
      [](const choice& c) {
        return std::array{+c.causal, +c.softcap,   +c.alibi,        +c.sinks, +c.score, +c.lengths,
                          +c.d_lse,  +c.saved_lse, int(c.kv_heads), c.lists,  c.blocks};
      },
      true);
}

selected_problem problem_of(const problem_shape& shape, const setting& s, idx_t lists, std::uint64_t seed = 1) {
  selected_problem p = random_problem<selected_problem>(shape, seed);
  p.options.block = s.block;
  p.options.indices = random_lists(seed + 7, shape.batch, lists, shape.queries, s.count,
                                   shape.keys / s.block + (shape.keys % s.block != 0));
  return p;
}

selected_problem apply(const choice& c, idx_t queries, idx_t keys, idx_t dim = 9, idx_t value_dim = 12) {
  const problem_shape shape{
      .kv_heads = c.kv_heads, .queries = queries, .keys = keys, .dim = dim, .value_dim = value_dim};
  selected_problem p = problem_of(shape, settings[c.blocks], c.lists == 0 ? 1 : c.lists == 1 ? c.kv_heads : 4);
  reference::selected_keys_options& o = p.options;
  o.causal = c.causal;
  if (c.softcap) o.softcap = 1.5;
  if (c.alibi) o.alibi_slopes = {0.5, 0.25, 0.125, 0};
  if (c.sinks) o.sinks = {0.3, -1, 2, -reference::infinity};
  if (c.score) o.score = smooth_score{};
  if (c.lengths) o.scale = 0.4, o.query_lengths = {queries, queries / 2}, o.key_lengths = {keys / 3, keys - 1};
  return p;
}

template <class S>
void check_choices(idx_t queries, idx_t keys) {
  for (const choice& c : choices()) {
    CAPTURE(c.causal, c.softcap, c.alibi, c.sinks, c.score, c.lengths, c.d_lse, c.saved_lse, c.kv_heads);
    CAPTURE(c.lists, c.blocks);
    check_backward<S>(apply(c, queries, keys), c.d_lse, {.saved_lse = c.saved_lse});
  }
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("selected_keys_backward: options in all pairs", "[selected_keys_backward]", exact_types) {
  check_choices<TestType>(35, 35);
  check_choices<TestType>(21, 35);
  check_choices<TestType>(30, 13);
}

TEMPLATE_LIST_TEST_CASE("selected_keys_backward: keys that stand for several tokens", "[selected_keys_backward]",
                        exact_types) {
  for (setting s : {setting{1, 9}, {20, 2}}) {  // of blocks, by position alone
    selected_problem p = problem_of(
        {.batch = 2, .heads = 4, .kv_heads = 2, .queries = 60, .keys = 30, .dim = 9, .value_dim = 5}, s, 4, 1);
    p.options.causal = true, p.options.first_positions = {-5, 40}, p.options.span = s.block == 1 ? 4 : 1;
    p.options.sinks = {0.3, -1, 2, 0};
    CAPTURE(s.block);
    check_backward<TestType>(p, true, {.saved_lse = s.block == 1});
  }
}

TEMPLATE_LIST_TEST_CASE("selected_keys_backward: 16-bit storage computes in float", "[selected_keys_backward]",
                        storage_types) {
  check_choices<TestType>(19, 21);
}

TEST_CASE("selected_keys_backward: the reverse pass agrees with central differences", "[selected_keys_backward]") {
  for (const choice& c : choices()) check_central_differences(case_of(apply(c, 13, 13, 3, 4), c.d_lse));
}

TEMPLATE_LIST_TEST_CASE("selected_keys_backward: odd lengths, dims and blocks", "[selected_keys_backward]",
                        exact_types) {
  const std::array<idx_t, 2> both_lengths[] = {{0, 0},   {1, 1},   {2, 2},   {16, 16}, {63, 63}, {65, 65},
                                               {1, 300}, {5, 1},   {129, 60}, {0, 9},  {9, 0},   {48, 131}};
  const idx_t dims[] = {1, 3, 16, 33, 64};
  const setting given[] = {{1, 0}, {1, 70}, {5, 3}, {16, 2}, {33, 3}, {1000, 2}};
  attn::execution three(3, 0);
  for (std::size_t n = 0; n < std::size(both_lengths); ++n)
    for (std::size_t w = 0; w < std::size(given); ++w) {
      const auto [queries, keys] = both_lengths[n];
      problem_shape shape{.batch = 1, .heads = 4, .kv_heads = 2, .queries = queries, .keys = keys};
      shape.dim = dims[(n + w) % 5], shape.value_dim = dims[(n + 2 * w + 1) % 5];
      if (keys == 1) shape.value_dim = lone_key_value_dim;
      CAPTURE(queries, keys, shape.dim, shape.value_dim, given[w].block, given[w].count);
      check_backward<TestType>(problem_of(shape, given[w], w % 2 ? 2 : 4, n + 1), true, {}, w % 2 ? &three : nullptr);
    }
}

TEMPLATE_LIST_TEST_CASE("selected_keys_backward: long sequences, with and without threads", "[selected_keys_backward]",
                        exact_types) {
  for (setting s : {setting{1, 20}, {16, 3}})
    for (idx_t lists : {1, 2}) {
      const problem_shape shape{
          .batch = 1, .heads = 2, .kv_heads = 1, .queries = 4500, .keys = 700, .dim = 2, .value_dim = 3};
      const selected_problem p = rounded<TestType>(problem_of(shape, s, lists));
      const gradient_case c = case_of(p, true);
      const reference_gradients wanted = gradients_of(c, round_results<TestType>);
      attn::execution serial, two(2, 0), three(3, 0);
      const named_tensors alone = library_gradients<TestType>(p, c, wanted.d_results, {}, serial);
      for (std::size_t n = 0; n < c.names.size(); ++n)
        CHECK(relative_error(alone.at(c.names[n]), wanted.gradients[n]) <= product_gradient_tolerance<TestType>);
      for (attn::execution* threads : {&two, &three})
        CHECK(library_gradients<TestType>(p, c, wanted.d_results, {}, *threads) == alone);
    }
}

TEMPLATE_LIST_TEST_CASE("selected_keys: dropout and masks of keys, and their gradients", "[selected_keys_backward]",
                        exact_types) {
  for (setting s : {setting{1, 20}, {16, 3}}) {
    selected_problem p = problem_of({.queries = 50, .keys = 50, .dim = 8, .value_dim = 8}, s, 2, 3);
    p.options.dropout_rate = 0.2, p.options.dropout_seed = 3;
    p.options.key_mask = tensor<double>(1, 1, 1, 50, 1);
    for (idx_t j : {0, 7, 8, 49}) p.options.key_mask(0, 0, 0, j) = 0;
    p = rounded<TestType>(p);
    CHECK(relative_error(run_pattern<TestType>(p).out, expected(p).out) <= tolerance<TestType>::out);
    check_backward<TestType>(p, true);
  }
}

TEMPLATE_LIST_TEST_CASE("selected_keys_backward: sinks at the end of the range", "[selected_keys_backward]",
                        exact_types) {
  for (setting s : {setting{1, 20}, {16, 3}}) {
    selected_problem p = problem_of({.queries = 50, .keys = 50, .dim = 8, .value_dim = 8}, s, 2, 3);
    p.options.sinks = {2.3e38, 2.4e38, 3.4e38, 0.3};
    check_backward<TestType>(p, false);
  }
}

TEMPLATE_LIST_TEST_CASE("selected_keys_backward: gradients added, and each alone", "[selected_keys_backward]",
                        exact_types) {
  for (int blocks = 0; blocks < 4; ++blocks) {
    CAPTURE(blocks);
    const selected_problem p = apply({.causal = true, .softcap = true, .alibi = true, .sinks = true, .score = false,
                                      .lengths = true, .d_lse = true, .saved_lse = true, .kv_heads = 2, .lists = 1,
                                      .blocks = blocks},
                                     40, 40);
    check_accumulate<TestType>(p);
    check_each_alone<TestType>(p);
  }
}

}  // namespace testing::selected_keys_backward_tests
