#pragma once
// Runs a problem through topk_blocks.
#include "reference/topk_blocks.hpp"
#include "support/call_topk_blocks.hpp"
#include "support/run_pattern.hpp"

namespace testing {

using topk_problem = problem<reference::topk_blocks_options>;

template <class S>
struct library_form<S, reference::topk_blocks_options> : compiled_topk_blocks<S> {
  static void set(const reference::topk_blocks_options& from, attn::topk_blocks_options<S>& to) {
    to.block = from.block, to.topk = from.topk;
  }
};

// Unit-normal inputs, as S holds them, whose choices rounding does not decide.
template <class S>
topk_problem topk_of(const problem_shape& shape, const reference::topk_blocks_options& options, std::uint64_t seed = 1,
                     double least_gap = 1e-6) {
  for (;; seed += 100) {
    topk_problem p = random_problem<topk_problem>(shape, seed);
    p.options = options;
    p.q = rounded<S>(p.q), p.k = rounded<S>(p.k), p.v = rounded<S>(p.v);
    round_options<S>(p.options);
    if (reference::topk_gap(p.q, p.k, p.options) >= least_gap) return p;
  }
}

template <class N>
auto reference_of(const tensor<N>& q, const tensor<N>& k, const tensor<N>& v,
                  const reference::basic_topk_blocks_options<N>& o) {
  return reference::topk_blocks(q, k, v, o);
}
inline reference::result expected(const topk_problem& p) { return reference::topk_blocks(p.q, p.k, p.v, p.options); }

// The options all softmax operators share, but for `causal`: 0 to 31.
inline reference::topk_blocks_options chosen_topk(int bits, idx_t block, idx_t topk, idx_t queries, idx_t keys) {
  reference::topk_blocks_options o;
  choose(o, 2 * bits, queries, keys);
  o.block = block, o.topk = topk;
  return o;
}

}  // namespace testing
