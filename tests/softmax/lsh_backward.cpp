// The gradients of lsh against the reverse pass of its reference: options in all pairs, odd lengths and chunks, all
// types.
#include "support/pairwise.hpp"
#include "support/run_pattern_backward.hpp"

namespace testing::lsh_backward_tests {
namespace {

using lsh_problem = problem<reference::lsh_options>;

lsh_problem drawn_problem(const problem_shape& s, const reference::lsh_options& options, std::uint64_t seed) {
  lsh_problem p{random_normal(seed, s.batch, s.heads, s.queries, s.dim),
                {},
                random_normal(seed + 1, s.batch, s.kv_heads, s.queries, s.value_dim),
                options};
  p.options.rotations = random_normal(seed + 2, seed % 2 ? s.heads : 1, options.rounds, s.dim, options.buckets / 2);
  return p;
}

// On inputs whose buckets rounding does not decide.
template <class S>
lsh_problem problem_of(const problem_shape& shape, const reference::lsh_options& options, std::uint64_t seed = 1) {
  lsh_problem p = rounded<S>(drawn_problem(shape, options, seed));
  while (reference::lsh_gap(p.q, p.options) < 2e-5) p = rounded<S>(drawn_problem(shape, options, seed += 100));
  return p;
}

struct choice {
  bool causal, softcap, alibi, sinks, score, lengths, wrap, ahead, scaled, norm_eps, d_lse, saved_lse;
  idx_t kv_heads, chunk;
};

std::vector<choice> choices() {
  std::vector<choice> drawn;
  random_source random(11);
  for (int n = 0; n < 500; ++n) {
    const auto flag = [&random] { return random.below(2) == 1; };
    choice c;
    c.causal = flag(), c.softcap = flag(), c.alibi = flag(), c.sinks = flag(), c.score = flag(), c.lengths = flag();
    c.wrap = flag(), c.ahead = flag(), c.scaled = flag(), c.norm_eps = flag(), c.d_lse = flag(), c.saved_lse = flag();
    c.kv_heads = idx_t(1) << random.below(3), c.chunk = 3 + 5 * random.below(3);
    drawn.push_back(c);
  }
  return selected(
      drawn,
      [](const choice& c) {
        return std::array{+c.causal, +c.softcap, +c.alibi,    +c.sinks, +c.score,     +c.lengths,      +c.wrap,
                          +c.ahead,  +c.scaled,  +c.norm_eps, +c.d_lse, +c.saved_lse, int(c.kv_heads), int(c.chunk)};
      },
      true);
}

template <class S>
lsh_problem apply(const choice& c, idx_t length, idx_t dim = 9, idx_t value_dim = 12) {
  reference::lsh_options o;
  o.rounds = c.ahead ? 3 : 2, o.buckets = c.wrap ? 6 : 2, o.chunk = c.chunk, o.wrap = c.wrap;
  o.lookahead = c.ahead, o.scaled = c.scaled, o.norm_eps = c.norm_eps ? 0.01 : 0;
  o.causal = c.causal;
  if (c.softcap) o.softcap = 1.5;
  if (c.alibi) o.alibi_slopes = {0.5, 0.25, 0.125, 0};
  if (c.sinks) o.sinks = {0.3, -1, 2, -reference::infinity};
  if (c.score) o.score = smooth_score{};
  if (c.lengths) o.lengths = {length, length > 9 ? length - 9 : 0};
  return problem_of<S>({.kv_heads = c.kv_heads, .queries = length, .dim = dim, .value_dim = value_dim}, o);
}

template <class S>
void check_choices(idx_t length) {
  for (const choice& c : choices()) {
    CAPTURE(c.causal, c.softcap, c.alibi, c.sinks, c.score, c.lengths, c.wrap, c.ahead, c.scaled, c.norm_eps, c.d_lse,
            c.saved_lse, c.kv_heads, c.chunk);
    check_backward<S>(apply<S>(c, length), c.d_lse, {.saved_lse = c.saved_lse});
  }
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("lsh_backward: options in all pairs", "[lsh_backward]", exact_types) {
  check_choices<TestType>(41);
  check_choices<TestType>(9);
}

TEMPLATE_LIST_TEST_CASE("lsh_backward: 16-bit storage computes in float", "[lsh_backward]", storage_types) {
  check_choices<TestType>(23);
}

TEST_CASE("lsh_backward: the reverse pass agrees with central differences", "[lsh_backward]") {
  for (const choice& c : choices()) {
    if (c.causal && !c.wrap) continue;
    check_central_differences(case_of(apply<double>(c, 7, 3, 4), c.d_lse));
  }
}

TEMPLATE_LIST_TEST_CASE("lsh_backward: odd lengths, dims, chunks and buckets", "[lsh_backward]", exact_types) {
  const idx_t lengths[] = {0, 1, 2, 7, 16, 63, 64, 65, 127, 130}, dims[] = {1, 3, 16, 33, 64}, chunks[] = {1, 16, 1000};
  attn::execution three(3, 0);
  for (std::size_t n = 0; n < std::size(lengths); ++n)
    for (std::size_t c = 0; c < std::size(chunks); ++c) {
      reference::lsh_options o;
      o.rounds = 1 + static_cast<idx_t>(n + c) % 3, o.buckets = 2 * (1 + static_cast<idx_t>(5 * n + 7 * c) % 40);
      o.chunk = chunks[c], o.causal = (n + c) % 2, o.wrap = (n + c) % 3 == 0;
      problem_shape shape{.batch = 1, .heads = 2, .kv_heads = 1, .queries = lengths[n]};
      shape.dim = dims[(n + c) % 5], shape.value_dim = dims[(n + 2 * c + 1) % 5];
      if (lengths[n] == 1) shape.value_dim = lone_key_value_dim;
      if (lengths[n] > 65) shape.dim = 5, shape.value_dim = 3;
      CAPTURE(lengths[n], o.rounds, o.buckets, o.chunk, o.causal, o.wrap, shape.dim, shape.value_dim);
      check_backward<TestType>(problem_of<TestType>(shape, o, n + 1), true, {}, c == 1 ? &three : nullptr);
    }
}

TEMPLATE_LIST_TEST_CASE("lsh_backward: sequences of many segments", "[lsh_backward]", exact_types) {
  attn::execution four(4, 0);
  for (idx_t chunk : {7, 300}) {
    reference::lsh_options o;
    o.rounds = chunk == 7 ? 2 : 1, o.buckets = 40, o.chunk = chunk;
    o.causal = chunk == 7, o.wrap = true, o.lookahead = chunk == 7;
    problem_shape shape{.batch = 1, .heads = 1, .kv_heads = 1, .queries = chunk == 7 ? 1303 : 700};
    shape.dim = 3, shape.value_dim = 2;
    const lsh_problem p = problem_of<TestType>(shape, o, 40);
    CAPTURE(chunk);
    check_backward<TestType>(p, true);
    check_backward<TestType>(p, true, {}, &four);
  }
}

TEMPLATE_LIST_TEST_CASE("lsh_backward: gradients added, and each alone", "[lsh_backward]", exact_types) {
  for (bool some : {false, true}) {
    choice c{some, true, true, true, !some, true, some, !some, true, some, true, true, 2, 8};
    CAPTURE(some);
    check_accumulate<TestType>(apply<TestType>(c, 35));
    check_each_alone<TestType>(apply<TestType>(c, 35));
  }
}

}  // namespace testing::lsh_backward_tests
