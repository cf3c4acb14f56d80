// attn: the gradients of strided.
//
//   attn::strided(q, k, v, out, {.stride = 64, .lse = lse});
//   attn::strided_backward(q, k, v, out, d_out, {.q = dq, .k = dk, .v = dv}, {.stride = 64, .lse = lse});
//
// Over the visible keys of strided.hpp; formulas, shapes, cost, errors, lse and score functions are those of
// pattern_softmax_backward.hpp (strided: of joined patterns).
#pragma once

#include <attn/softmax/detail/pattern_softmax_backward_run.hpp>
#include <attn/softmax/strided.hpp>

namespace attn { inline namespace ATTN_ISA {

/// The gradients strided_backward computes: q, k, v, relative_bias, alibi_slopes, sinks, d_lse, accumulate.
template <class S>
using strided_gradients = pattern_gradients<S>;

/// The gradients of strided. See the top of the file.
template <viewable Q, viewable K, viewable V, viewable O, viewable D,
          class Options = strided_options<element_of<const Q&>>, class Score = detail::no_score,
          class ScoreBackward = detail::no_score_backward>
void strided_backward(const Q& q, const K& k, const V& v, const O& out, const D& d_out,
                      const strided_gradients<element_of<const Q&>>& gradients, Options&& options = {},
                      Score&& score = {}, ScoreBackward&& score_backward = {}, execution_ref exec = {}) {
  auto call = detail::checked_backward_call<strided_options>("strided_backward", q, k, v, out, d_out, gradients,
                                                             options, score, score_backward, exec);
  detail::with_strided_pattern(call.views, call.options, [&](const auto& pattern) {
    detail::run_pattern_softmax_backward(call, detail::patterns_of(pattern));
  });
}

}}  // namespace attn::ATTN_ISA
