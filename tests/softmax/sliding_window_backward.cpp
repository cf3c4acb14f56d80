// The gradients of sliding_window against the reverse pass of its reference: options in all pairs, windows of all
// sizes, all types.
#include <attn/softmax/sliding_window_backward.hpp>

#include "support/pairwise.hpp"
#include "support/run_backward.hpp"

namespace testing::sliding_window_backward_tests {
namespace {

sliding_window_problem problem_of(const problem_shape& shape, std::uint64_t seed = 1) {
  return random_problem<sliding_window_problem>(shape, seed);
}

enum class lengths { none, both, queries_and_keys, keys_only };
enum class reach { few, one_side, none, unlimited, past_only_unlimited };
enum class dilation { one, three, per_head };
enum class globals { none, some, all_over, own_projections };

struct choice {
  bool causal, softcap, alibi, sinks, score, scale, d_lse, saved_lse;
  lengths given;
  reach window;
  dilation steps;
  globals positions;
  idx_t kv_heads;
};

// Every two values of two options meet.
std::vector<choice> choices() {
  std::vector<choice> drawn;
  random_source random(5);
  for (int n = 0; n < 500; ++n) {
    const auto flag = [&random] { return random.below(2) == 1; };
    choice c;
    c.causal = flag(), c.softcap = flag(), c.alibi = flag(), c.sinks = flag(), c.score = flag();
    c.scale = flag(), c.d_lse = flag(), c.saved_lse = flag();
    c.given = static_cast<lengths>(random.below(4)), c.window = static_cast<reach>(random.below(5));
    c.steps = static_cast<dilation>(random.below(3)), c.positions = static_cast<globals>(random.below(4));
    c.kv_heads = idx_t(1) << random.below(3);
    drawn.push_back(c);
  }
  return selected(
      drawn,
      [](const choice& c) {
        return std::array{+c.causal,    +c.softcap,       +c.alibi,       +c.sinks,     +c.score,
                          +c.scale,     +c.d_lse,         +c.saved_lse,   int(c.given), int(c.window),
                          int(c.steps), int(c.positions), int(c.kv_heads)};
      },
      true);
}

sliding_window_problem apply(const choice& c, idx_t queries, idx_t keys, idx_t dim = 9, idx_t value_dim = 12) {
  // Projections of their own are for self-attention.
  if (c.given == lengths::both || c.positions == globals::own_projections) queries = keys;
  problem_shape shape{.kv_heads = c.kv_heads, .queries = queries, .keys = keys, .dim = dim, .value_dim = value_dim};
  sliding_window_problem p = problem_of(shape);
  auto& o = p.options;
  o.causal = c.causal;
  if (c.scale) o.scale = -0.4;
  if (c.softcap) o.softcap = 1.5;
  if (c.alibi) o.alibi_slopes = {0.5, 0.25, 0.125, 0};
  if (c.sinks) o.sinks = {0.3, -1, 2, -reference::infinity};
  if (c.score) o.score = smooth_score{};
  if (c.given == lengths::both) o.lengths = {keys - 5, keys};
  if (c.given == lengths::queries_and_keys)
    o.query_lengths = {queries, queries / 2}, o.key_lengths = {keys / 3, keys - 1};
  if (c.given == lengths::keys_only) o.key_lengths = {keys, keys / 2};
  o.left = o.right = 4;
  if (c.window == reach::one_side) o.left = 6, o.right = 1;
  if (c.window == reach::none) o.left = 0, o.right = 0;
  if (c.window == reach::unlimited) o.left = o.right = reference::unlimited;
  if (c.window == reach::past_only_unlimited) o.left = reference::unlimited, o.right = 2;
  if (c.steps == dilation::three) o.dilation = {3};
  if (c.steps == dilation::per_head) o.dilation = {1, 4, 2, 7};
  if (c.positions != globals::none) o.global_positions = {12, 0, 5};
  if (c.positions == globals::all_over)
    for (idx_t j = 3; j < keys + 9; j += 4) o.global_positions.push_back(j == 5 ? 6 : j + (j == 12));
  if (c.positions != globals::none && c.softcap) o.global_counts = {std::ssize(o.global_positions) - 2, 2};
  if (c.positions == globals::own_projections) {
    o.q_global = random_normal(21, shape.batch, shape.heads, queries, dim);
    o.k_global = random_normal(22, shape.batch, shape.kv_heads, keys, dim);
    o.v_global = random_normal(23, shape.batch, shape.kv_heads, keys, value_dim);
  }
  return p;
}

template <class S>
void check_choice(const choice& c, idx_t queries, idx_t keys) {
  CAPTURE(c.causal, c.softcap, c.alibi, c.sinks, c.score, c.scale, c.d_lse, c.saved_lse, int(c.given), int(c.window),
          int(c.steps), int(c.positions), c.kv_heads);
  check_backward<S>(apply(c, queries, keys), c.d_lse, {.saved_lse = c.saved_lse});
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("sliding_window_backward: options in all pairs", "[sliding_window_backward]", exact_types) {
  for (const choice& c : choices()) check_choice<TestType>(c, 21, 35);
  for (const choice& c : choices()) check_choice<TestType>(c, 30, 13);  // rows that see no key
}

TEMPLATE_LIST_TEST_CASE("sliding_window_backward: 16-bit storage computes in float", "[sliding_window_backward]",
                        storage_types) {
  for (const choice& c : choices()) check_choice<TestType>(c, 5, 19);
}

TEST_CASE("sliding_window_backward: the reverse pass agrees with central differences", "[sliding_window_backward]") {
  for (const choice& c : choices()) {
    CAPTURE(c.causal, c.softcap, c.alibi, c.sinks, c.score, c.scale, c.d_lse, int(c.given), int(c.window));
    check_central_differences(case_of(apply(c, 6, 9, 3, 4), c.d_lse));
  }
}

TEMPLATE_LIST_TEST_CASE("sliding_window_backward: windows of all sizes, odd lengths and dims",
                        "[sliding_window_backward]", exact_types) {
  const idx_t lengths[] = {0, 1, 2, 16, 63, 64, 65, 127, 130, 257}, dims[] = {1, 3, 16, 33, 64};
  const std::array<idx_t, 2> windows[] = {{5, 3}, {20, 0}, {0, 70}, {48, 48}, {128, 1}, {3, 200}};
  for (std::size_t n = 0; n < std::size(lengths); ++n)
    for (std::size_t w = 0; w < std::size(windows); ++w) {
      problem_shape shape{.batch = 1, .heads = 2, .kv_heads = 1, .queries = lengths[n], .keys = lengths[n]};
      shape.dim = dims[(n + w) % 5], shape.value_dim = dims[(n + 2 * w + 1) % 5];
      if (lengths[n] == 1) shape.value_dim = lone_key_value_dim;
      if (lengths[n] > 65) shape.heads = 1, shape.dim = w % 2 ? 3 : 9, shape.value_dim = w % 2 ? 8 : 5;
      sliding_window_problem p = problem_of(shape, n + 1);
      p.options.left = windows[w][0], p.options.right = windows[w][1];
      p.options.causal = (n + w) % 3 == 0;
      if ((n + w) % 4 == 1) p.options.dilation = {5};
      if ((n + w) % 4 == 2) p.options.global_positions = {1, 64, lengths[n] - 1};
      if (lengths[n] <= 2) p.options.global_positions.clear();
      CAPTURE(shape.queries, shape.dim, shape.value_dim, p.options.left, p.options.right, p.options.causal);
      check_backward<TestType>(p, true);
    }
}

// More positions than one part of the sequence has, with threads and without.
TEMPLATE_LIST_TEST_CASE("sliding_window_backward: long sequences", "[sliding_window_backward]", exact_types) {
  attn::execution four(4, 0);
  for (idx_t window : {3, 40, 140})
    for (bool globals : {false, true}) {
      if (globals && window == 140) continue;
      const idx_t keys = window == 3 && !globals ? 4500 : 2500;
      sliding_window_problem p = problem_of(
          {.batch = 1, .heads = 2, .kv_heads = 1, .queries = keys - 100, .keys = keys, .dim = 2, .value_dim = 1});
      p.options.left = window, p.options.right = window == 40 ? 0 : 2;
      if (globals) p.options.global_positions = {7, 2300};
      if (window == 3) p.options.dilation = {1, 300}, p.options.alibi_slopes = {0.01, 0.5};
      CAPTURE(window, globals);
      check_backward<TestType>(p, true);
      check_backward<TestType>(p, true, {}, &four);
    }
}

TEMPLATE_LIST_TEST_CASE("sliding_window_backward: accumulate adds once", "[sliding_window_backward]", exact_types) {
  for (dilation steps : {dilation::one, dilation::per_head})
    for (globals positions : {globals::none, globals::some, globals::own_projections}) {
      choice c{true, true, true, true, true, false, true, true, lengths::both, reach::few, steps, positions, 2};
      CAPTURE(int(steps), int(positions));
      check_accumulate<TestType>(apply(c, 35, 35));
    }
}

TEMPLATE_LIST_TEST_CASE("sliding_window_backward: each gradient alone", "[sliding_window_backward]", exact_types) {
  for (dilation steps : {dilation::one, dilation::per_head})
    for (globals positions : {globals::none, globals::some, globals::own_projections}) {
      choice c{true, false, true, true, false, false, true, true, lengths::keys_only, reach::few, steps, positions, 2};
      CAPTURE(int(steps), int(positions));
      check_each_alone<TestType>(apply(c, 35, 35));
    }
}

TEMPLATE_LIST_TEST_CASE("sliding_window_backward: queries at any position", "[sliding_window_backward]", exact_types) {
  for (idx_t first : {idx_t(-30), idx_t(-3), idx_t(0), idx_t(5), idx_t(60)})
    for (bool causal : {false, true})
      for (bool globals : {false, true}) {
        sliding_window_problem p = problem_of(
            {.heads = 2, .kv_heads = 1, .queries = 31, .keys = 37, .dim = 5, .value_dim = 7});
        p.options.left = first == 5 ? reference::unlimited : 6, p.options.right = first == 0 ? 0 : 3;
        p.options.causal = causal;
        p.options.first_position = first;
        p.options.alibi_slopes = {0.05, 0.025};
        p.options.sinks = {0.3, -1};
        if (first == -3) p.options.dilation = {3, 2};
        if (first == 5) p.options.score = smooth_score{};
        if (first == 0) p.options.query_lengths = {31, 8}, p.options.key_lengths = {14, 37};
        if (globals) p.options.global_positions = {3, 0, 35, 39, 70};
        CAPTURE(first, causal, globals);
        check_backward<TestType>(p, true, {.saved_lse = causal});
      }
}

TEMPLATE_LIST_TEST_CASE("sliding_window_backward: sinks at the end of the range", "[sliding_window_backward]",
                        exact_types) {
  sliding_window_problem p = problem_of({.queries = 31, .keys = 37, .dim = 5, .value_dim = 7});
  p.options.left = 6, p.options.right = 3, p.options.global_positions = {3, 20};
  p.options.sinks = {2.3e38, 2.4e38, 3.4e38, 0.3};
  check_backward<TestType>(p, false);
}

// Parts begin every 2048 keys: queries beyond the keys belong to the last.
TEST_CASE("sliding_window_backward: several parts and queries beyond the keys", "[sliding_window_backward]") {
  for (idx_t first : {idx_t(-60), idx_t(4080)}) {
    sliding_window_problem p = problem_of(
        {.batch = 1, .heads = 1, .kv_heads = 1, .queries = 110, .keys = 4130, .dim = 3, .value_dim = 2});
    p.options.left = 6, p.options.right = 3;
    p.options.first_position = first;
    CAPTURE(first);
    check_backward<float>(p, true);
  }
}

}  // namespace testing::sliding_window_backward_tests
