// attn: the gradients of bigbird.
//
//   attn::bigbird(q, k, v, out, {.random = random, .lse = lse});
//   attn::bigbird_backward(q, k, v, out, d_out, {.q = dq, .k = dk, .v = dv}, {.random = random, .lse = lse});
//
// Over the visible keys of bigbird.hpp; formulas, shapes, cost, errors, lse and score functions are those of
// pattern_softmax_backward.hpp.
#pragma once

#include <attn/softmax/bigbird.hpp>
#include <attn/softmax/detail/pattern_softmax_backward_run.hpp>

namespace attn { inline namespace ATTN_ISA {

/// The gradients bigbird_backward computes: q, k, v, relative_bias, alibi_slopes, sinks, d_lse, accumulate.
template <class S>
using bigbird_gradients = pattern_gradients<S>;

/// The gradients of bigbird. See the top of the file.
template <viewable Q, viewable K, viewable V, viewable O, viewable D,
          class Options = bigbird_options<element_of<const Q&>>, class Score = detail::no_score,
          class ScoreBackward = detail::no_score_backward>
void bigbird_backward(const Q& q, const K& k, const V& v, const O& out, const D& d_out,
                      const bigbird_gradients<element_of<const Q&>>& gradients, Options&& options = {},
                      Score&& score = {}, ScoreBackward&& score_backward = {}, execution_ref exec = {}) {
  auto call = detail::checked_backward_call<bigbird_options>("bigbird_backward", q, k, v, out, d_out, gradients,
                                                             options, score, score_backward, exec);
  const auto pattern = detail::bigbird_pattern_of(call.views, call.shape, call.options);
  detail::run_pattern_softmax_backward(call, detail::patterns_of(pattern));
}

}}  // namespace attn::ATTN_ISA
