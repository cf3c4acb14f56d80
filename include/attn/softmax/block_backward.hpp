// attn: the gradients of block.
//
//   attn::block(q, k, v, out, {.size = 128, .lse = lse});
//   attn::block_backward(q, k, v, out, d_out, {.q = dq, .k = dk, .v = dv}, {.size = 128, .lse = lse});
//
// Over the visible keys of block.hpp; formulas, shapes, cost, errors, lse and score functions are those of
// pattern_softmax_backward.hpp.
#pragma once

#include <attn/softmax/block.hpp>
#include <attn/softmax/detail/pattern_softmax_backward_run.hpp>

namespace attn { inline namespace ATTN_ISA {

/// The gradients block_backward computes: q, k, v, relative_bias, alibi_slopes, sinks, d_lse, accumulate.
template <class S>
using block_gradients = pattern_gradients<S>;

/// The gradients of block. See the top of the file.
template <viewable Q, viewable K, viewable V, viewable O, viewable D,
          class Options = block_options<element_of<const Q&>>, class Score = detail::no_score,
          class ScoreBackward = detail::no_score_backward>
void block_backward(const Q& q, const K& k, const V& v, const O& out, const D& d_out,
                    const block_gradients<element_of<const Q&>>& gradients, Options&& options = {},
                    Score&& score = {}, ScoreBackward&& score_backward = {}, execution_ref exec = {}) {
  auto call = detail::checked_backward_call<block_options>("block_backward", q, k, v, out, d_out, gradients, options,
                                                           score, score_backward, exec);
  const auto pattern = detail::block_pattern_of(call.views, call.shape, call.options);
  detail::run_pattern_softmax_backward(call, detail::patterns_of(pattern));
}

}}  // namespace attn::ATTN_ISA
