// attn: the gradients of selected_keys.
//
//   attn::selected_keys(q, k, v, out, indices, {.causal = true, .lse = lse});
//   attn::selected_keys_backward(q, k, v, out, indices, d_out, {.q = dq, .k = dk, .v = dv},
//                                {.causal = true, .lse = lse});
//
// The formulas of full_softmax_backward.hpp over the keys that the lists name, which have no gradient themselves and
// are given as to the forward call. Shapes, errors, lse and score functions as there.
//
// Cost     2 B H Lq n block (3 D + 2 Dv) operations; without lse, the forward call without values too. Scratch, per key
//          head in progress: Lk (D + Dv) numbers, up to four times that for long sequences; with blocks of 16 keys and
//          more the packed keys and values too, and Lq D numbers.
//
// With lists of 524288 keys, of which one has .99 of the weight, dq and dk err in float by less than 2e-5 of their
// largest with blocks of 16 keys and more, else by 5e-5 (full_softmax_backward.hpp says why).
#pragma once

#include <attn/softmax/detail/selected_keys_backward_run.hpp>
#include <attn/softmax/selected_keys.hpp>

namespace attn { inline namespace ATTN_ISA {

/// The gradients selected_keys_backward computes: q, k, v, alibi_slopes, sinks, d_lse, accumulate.
template <class S>
using selected_keys_gradients = softmax_gradients<S>;

/// The gradients of selected_keys. See the top of the file.
template <viewable Q, viewable K, viewable V, viewable O, viewable D,
          class Options = selected_keys_options<element_of<const Q&>>, class Score = detail::no_score,
          class ScoreBackward = detail::no_score_backward>
void selected_keys_backward(const Q& q, const K& k, const V& v, const O& out, const index_view& indices, const D& d_out,
                            const selected_keys_gradients<element_of<const Q&>>& gradients, Options&& options = {},
                            Score&& score = {}, ScoreBackward&& score_backward = {}, execution_ref exec = {}) {
  auto call = detail::checked_backward_call<selected_keys_options>("selected_keys_backward", q, k, v, out, d_out,
                                                                   gradients, options, score, score_backward, exec);
  detail::check_block_of_span(call.views, call.options);
  const auto lists = detail::check_lists(call.views, call.shape, call.lengths(), indices, call.options.block);
  detail::run_selected_keys_backward(call, lists);
}

}}  // namespace attn::ATTN_ISA
