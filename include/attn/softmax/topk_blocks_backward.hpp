// attn: the gradients of topk_blocks.
//
//   attn::topk_blocks(q, k, v, out, {.block = 128, .topk = 3, .lse = lse});
//   attn::topk_blocks_backward(q, k, v, out, d_out, {.q = dq, .k = dk, .v = dv},
//                              {.block = 128, .topk = 3, .lse = lse});
//
// The formulas of full_softmax_backward.hpp over the visible keys of topk_blocks.hpp. The choice of blocks has no
// gradient; it is computed again, with the same result. Shapes, errors, lse and score functions as there.
//
// Cost     2 (3 D + 2 Dv) operations for every visible key of a query, and the choice; without lse, the forward call
//          without values too. Scratch, per key head in progress: Lq D numbers, the packed keys and values, and
//          Lk (D + Dv) numbers, up to four times that for long sequences.
#pragma once

#include <attn/softmax/detail/topk_blocks_backward_run.hpp>
#include <attn/softmax/topk_blocks.hpp>

namespace attn { inline namespace ATTN_ISA {

/// The gradients topk_blocks_backward computes: q, k, v, alibi_slopes, sinks, d_lse, accumulate.
template <class S>
using topk_blocks_gradients = softmax_gradients<S>;

/// The gradients of topk_blocks. See the top of the file.
template <viewable Q, viewable K, viewable V, viewable O, viewable D,
          class Options = topk_blocks_options<element_of<const Q&>>, class Score = detail::no_score,
          class ScoreBackward = detail::no_score_backward>
void topk_blocks_backward(const Q& q, const K& k, const V& v, const O& out, const D& d_out,
                          const topk_blocks_gradients<element_of<const Q&>>& gradients, Options&& options = {},
                          Score&& score = {}, ScoreBackward&& score_backward = {}, execution_ref exec = {}) {
  auto call = detail::checked_backward_call<topk_blocks_options>("topk_blocks_backward", q, k, v, out, d_out, gradients,
                                                                 options, score, score_backward, exec);
  const auto blocks = detail::check_topk(call.forward, call.options);
  detail::run_topk_blocks_backward(call, blocks);
}

}}  // namespace attn::ATTN_ISA
