// The gradients of full_softmax against the reverse pass of its reference: options in all pairs, odd lengths and dims,
// all types.
#include <attn/softmax/full_softmax_backward.hpp>

#include "support/pairwise.hpp"
#include "support/run_backward.hpp"

namespace testing::full_softmax_backward_tests {
namespace {

full_softmax_problem problem_of(const problem_shape& shape, std::uint64_t seed = 1) {
  return random_problem<full_softmax_problem>(shape, seed);
}

enum class lengths { none, both, queries_and_keys, keys_only };
enum class bias { none, one_row, per_row, per_head, everything };

struct choice {
  bool causal, softcap, alibi, sinks, score, scale, d_lse, saved_lse;
  lengths given;
  bias added;
  idx_t kv_heads;
};

// Every two values of two options meet.
std::vector<choice> choices() {
  std::vector<choice> drawn;
  random_source random(3);
  for (int n = 0; n < 500; ++n) {
    const auto flag = [&random] { return random.below(2) == 1; };
    choice c;
    c.causal = flag(), c.softcap = flag(), c.alibi = flag(), c.sinks = flag(), c.score = flag();
    c.scale = flag(), c.d_lse = flag(), c.saved_lse = flag();
    c.given = static_cast<lengths>(random.below(4)), c.added = static_cast<bias>(random.below(5));
    c.kv_heads = idx_t(1) << random.below(3);
    drawn.push_back(c);
  }
  return selected(
      drawn,
      [](const choice& c) {
        return std::array{+c.causal, +c.softcap,   +c.alibi,     +c.sinks,     +c.score,       +c.scale,
                          +c.d_lse,  +c.saved_lse, int(c.given), int(c.added), int(c.kv_heads)};
      },
      true);
}

full_softmax_problem apply(const choice& c, idx_t queries, idx_t keys, idx_t dim = 9, idx_t value_dim = 12) {
  problem_shape shape{.kv_heads = c.kv_heads,
                      .queries = c.given == lengths::both ? keys : queries,
                      .keys = keys,
                      .dim = dim,
                      .value_dim = value_dim};
  full_softmax_problem p = problem_of(shape);
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
  const idx_t rows = shape.queries;
  if (c.added == bias::one_row) o.bias = random_normal(8, 1, 1, 1, keys);
  if (c.added == bias::per_row) o.bias = random_normal(8, shape.batch, 1, rows, keys);
  if (c.added == bias::per_head) o.bias = random_normal(8, 1, shape.heads, rows, keys);
  if (c.added == bias::everything) o.bias = random_normal(8, shape.batch, shape.heads, rows, keys);
  for (std::size_t n = 0; n < o.bias.data.size(); n += 7) o.bias.data[n] = -reference::infinity;
  return p;
}

template <class S>
void check_choice(const choice& c, idx_t queries, idx_t keys) {
  CAPTURE(c.causal, c.softcap, c.alibi, c.sinks, c.score, c.scale, c.d_lse, c.saved_lse, int(c.given), int(c.added),
          c.kv_heads);
  check_backward<S>(apply(c, queries, keys), c.d_lse, {.saved_lse = c.saved_lse});
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("full_softmax_backward: options in all pairs", "[full_softmax_backward]", exact_types) {
  for (const choice& c : choices()) check_choice<TestType>(c, 21, 35);
  for (const choice& c : choices()) check_choice<TestType>(c, 19, 13);  // rows that see no key
}

TEMPLATE_LIST_TEST_CASE("full_softmax_backward: 16-bit storage computes in float", "[full_softmax_backward]",
                        storage_types) {
  for (const choice& c : choices()) check_choice<TestType>(c, 5, 19);
  check_backward<TestType>(problem_of({.batch = 1, .queries = 70, .keys = 70, .dim = 33, .value_dim = 7}));
}

TEST_CASE("full_softmax_backward: the reverse pass agrees with central differences", "[full_softmax_backward]") {
  for (const choice& c : choices()) {
    CAPTURE(c.causal, c.softcap, c.alibi, c.sinks, c.score, c.scale, c.d_lse, int(c.given), int(c.added), c.kv_heads);
    full_softmax_problem p = apply(c, 6, 9, 3, 4);
    check_central_differences(case_of(p, c.d_lse));
  }
}

TEMPLATE_LIST_TEST_CASE("full_softmax_backward: odd lengths and dims", "[full_softmax_backward]", exact_types) {
  const idx_t lengths[] = {0, 1, 2, 7, 16, 63, 64, 65, 127, 130}, dims[] = {1, 3, 16, 33, 64, 80};
  for (std::size_t n = 0; n < std::size(lengths); ++n)
    for (std::size_t step : {0u, 3u}) {
      if (lengths[n] > 65 && step != 0) continue;
      problem_shape shape{.batch = 1, .heads = 2, .kv_heads = 1, .queries = lengths[n], .keys = lengths[n]};
      shape.dim = dims[(n + step) % 6], shape.value_dim = dims[(n + 2 * step + 1) % 6];
      if (lengths[n] == 1) shape.value_dim = lone_key_value_dim;
      if (lengths[n] > 65) shape.heads = 1, shape.dim = n % 2 ? 3 : 17, shape.value_dim = n % 2 ? 16 : 5;
      full_softmax_problem p = problem_of(shape, n + 1);
      p.options.causal = (n + step) % 2 == 0;
      CAPTURE(shape.queries, shape.dim, shape.value_dim, p.options.causal);
      check_backward<TestType>(p, true);
    }
}

TEMPLATE_LIST_TEST_CASE("full_softmax_backward: queries and keys of different lengths", "[full_softmax_backward]",
                        exact_types) {
  const std::array<idx_t, 2> both_lengths[] = {{1, 300}, {2, 129},  {48, 49}, {5, 1},
                                               {300, 1}, {129, 60}, {0, 9},   {9, 0}};
  for (auto [queries, keys] : both_lengths)
    for (bool causal : {false, true}) {
      full_softmax_problem p = problem_of(
          {.batch = 1, .heads = 2, .kv_heads = 2, .queries = queries, .keys = keys, .dim = 5, .value_dim = 7});
      p.options.causal = causal;
      CAPTURE(queries, keys, causal);
      check_backward<TestType>(p, true, {.saved_lse = causal});
    }
}

TEMPLATE_LIST_TEST_CASE("full_softmax_backward: rows whose bias or score masks every key", "[full_softmax_backward]",
                        exact_types) {
  for (bool sinks : {false, true})
    for (bool score : {false, true}) {
      full_softmax_problem p = problem_of({.queries = 20, .keys = 23, .dim = 9, .value_dim = 4});
      p.options.bias = random_normal(8, 1, 4, 20, 23);
      for (idx_t h = 0; h < 4; ++h)
        for (idx_t i = h; i < 20; i += 5)
          for (idx_t j = 0; j < 23; ++j)  // with a score function, but the keys that mask themselves
            if (!score || !smooth_score::masks(h, i + 3, j)) p.options.bias(0, h, i, j) = -reference::infinity;
      if (sinks) p.options.sinks = {0.3, -1, 2, 0};
      if (score) p.options.score = smooth_score{};
      CAPTURE(sinks, score);
      check_backward<TestType>(p, true);
      check_backward<TestType>(p, false, {.saved_lse = false});
    }
}

// Sums over segments of keys, whose parts of dq are added in order.
TEMPLATE_LIST_TEST_CASE("full_softmax_backward: many keys, more threads than heads", "[full_softmax_backward]",
                        exact_types) {
  full_softmax_problem p =
      problem_of({.batch = 1, .heads = 2, .kv_heads = 1, .queries = 30, .keys = 1300, .dim = 4, .value_dim = 3});
  p.options.causal = true, p.options.alibi_slopes = {0.01, 0.5};
  p.options.bias = random_normal(8, 1, 1, 30, 1300);
  attn::execution four(4, 0);
  check_backward<TestType>(p, true);
  check_backward<TestType>(p, true, {}, &four);
}

TEMPLATE_LIST_TEST_CASE("full_softmax_backward: accumulate adds once", "[full_softmax_backward]", exact_types) {
  for (bias added : {bias::one_row, bias::per_head, bias::everything}) {
    choice c{true, true, true, true, true, false, true, true, lengths::queries_and_keys, added, 2};
    check_accumulate<TestType>(apply(c, 21, 35));
  }
}

TEMPLATE_LIST_TEST_CASE("full_softmax_backward: each gradient alone", "[full_softmax_backward]", exact_types) {
  for (bool score : {false, true}) {
    choice c{true, score, true, true, score, false, true, true, lengths::keys_only, bias::per_row, 2};
    CAPTURE(score);
    check_each_alone<TestType>(apply(c, 21, 35));
  }
}

TEMPLATE_LIST_TEST_CASE("full_softmax_backward: queries at any position", "[full_softmax_backward]", exact_types) {
  for (idx_t first : {idx_t(-30), idx_t(-3), idx_t(0), idx_t(5), idx_t(40)})
    for (bool causal : {false, true}) {
      full_softmax_problem p = problem_of(
          {.heads = 2, .kv_heads = 1, .queries = 17, .keys = 23, .dim = 5, .value_dim = 7});
      p.options.causal = causal;
      p.options.first_position = first;
      p.options.alibi_slopes = {0.05, 0.025};
      p.options.sinks = {0.3, -1};
      if (first == 5) p.options.score = smooth_score{};
      if (first == 0) p.options.query_lengths = {17, 8}, p.options.key_lengths = {4, 23};
      CAPTURE(first, causal);
      check_backward<TestType>(p, true, {.saved_lse = causal});
    }
}

TEMPLATE_LIST_TEST_CASE("full_softmax_backward: keys that stand for several tokens", "[full_softmax_backward]",
                        exact_types) {
  for (idx_t span : {1, 3, 8})
    for (bool saved_lse : {true, false}) {
      full_softmax_problem p = problem_of(
          {.heads = 2, .kv_heads = 1, .queries = 37, .keys = 11, .dim = 5, .value_dim = 7});
      p.options.causal = true, p.options.span = span, p.options.sinks = {0.3, -1};
      p.options.first_positions = {4, -9};
      if (span == 3) p.options.query_lengths = {37, 8}, p.options.key_lengths = {4, 11};
      CAPTURE(span, saved_lse);
      check_backward<TestType>(p, true, {.saved_lse = saved_lse});
    }
}

// In base 2 these end at the range of float: lse, in base e, is back in it.
TEMPLATE_LIST_TEST_CASE("full_softmax_backward: sinks at the end of the range", "[full_softmax_backward]",
                        exact_types) {
  for (bool saved_lse : {true, false}) {
    full_softmax_problem p = problem_of({.queries = 20, .keys = 23, .dim = 9, .value_dim = 4});
    p.options.sinks = {2.3e38, 2.4e38, 3.4e38, 0.3};
    check_backward<TestType>(p, false, {.saved_lse = saved_lse});
  }
}

}  // namespace testing::full_softmax_backward_tests
