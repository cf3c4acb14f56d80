#pragma once
// Runs a problem of topk_blocks through the library, forward, backward and in steps.
#include "reference/topk_blocks.hpp"
#include "support/call_topk_blocks.hpp"
#include "support/run_pattern_backward.hpp"

namespace testing {

template <class S>
struct library_form<S, reference::topk_blocks_options> : compiled_topk_blocks<S> {
  static void set(const reference::topk_blocks_options& from, attn::topk_blocks_options<S>& to) {
    to.block = from.block, to.topk = from.topk;
  }
};

template <class N>
auto reference_of(const tensor<N>& q, const tensor<N>& k, const tensor<N>& v,
                  const reference::basic_topk_blocks_options<N>& o) {
  return reference::topk_blocks(q, k, v, o);
}

using topk_blocks_problem = problem<reference::topk_blocks_options>;

inline topk_blocks_problem topk_problem(const problem_shape& shape, index block, index topk, std::uint64_t seed = 1) {
  auto p = random_problem<topk_blocks_problem>(shape, seed);
  p.options.block = block, p.options.topk = topk;
  return p;
}

// The tokens of a problem in these chunks. Rows start with poison values.
template <class S>
reference::result in_steps(const topk_blocks_problem& p, attn::topk_blocks_cache<S>& cache,
                           const std::vector<index>& chunks, attn::execution& execution) {
  const common_softmax_options<S, attn::topk_blocks_options<S>> stored(p.options);
  attn::topk_blocks_step_options<S> options{.scale = stored.options.scale, .topk = p.options.topk,
                                            .softcap = stored.options.softcap,
                                            .alibi_slopes = stored.options.alibi_slopes, .sinks = stored.options.sinks};
  const tensor<S> q = cast<S>(p.q), k = cast<S>(p.k), v = cast<S>(p.v);
  tensor<S> out(q.batch(), q.heads(), q.length(), v.dim(), S(7));
  tensor<real<S>> lse(q.batch(), q.heads(), q.length(), 1, real<S>(7));
  index begin = cache.tokens();
  for (index count : chunks) {
    const auto part = [&](auto x) { return x.slice(2, begin, count); };
    options.lse = part(row_view(lse));
    compiled_topk_blocks<S>::step(cache, part(view(q)), part(view(k)), part(view(v)), part(view(out)), options,
                                  stored.score, execution);
    begin += count;
  }
  return {cast<double>(out), cast<double>(lse)};
}

}  // namespace testing
