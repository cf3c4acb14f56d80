// attn: the gradients of strided.
//
//   attn::strided(q, k, v, out, {.stride = 64, .lse = lse});
//   attn::strided_backward(q, k, v, out, d_out, {.q = dq, .k = dk, .v = dv}, {.stride = 64, .lse = lse});
//
// The formulas of full_softmax_backward.hpp, over the visible keys of strided.hpp.
//
// Shapes   q, k, v, out, the options: as the forward call's; out and options.lse are what it wrote. d_out as out,
//          d_lse as lse. Gradients have the shapes of what they are of; dk and dv are summed over the query heads of a
//          group.
// Cost     2 (3 D + 2 Dv) operations for every visible key of a query; without lse, one product more. Scratch, per key
//          head in progress: about Lk (3 D + 2 Dv) numbers, up to Lk (6 D + 5 Dv) for long sequences, and Lq D for
//          strided; per thread the keys of a query set, as forward; with drelative_bias lists of 2R + 1 doubles for
//          each head and task; never Lq x Lk.
// Throws   std::invalid_argument for shapes or options that do not fit, for gradients of what was not given or that
//          share memory with an input or one another, before anything is written.
//
// A row that sees no key has gradient 0. score_backward(s, d, batch, head, i, j) gives d times the derivative of
// score(s, batch, head, i, j) by s.
//
// Where lse is given, its rounding, |lse| 2^-24 in float (double: 2^-53), is an error of the weights. Where it is not,
// it is computed again in more digits than one number has: leave it out where scores exceed 1e4.
#pragma once

#include <attn/softmax/strided.hpp>
#include <attn/softmax/detail/pattern_backward.hpp>

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
  detail::with_strided_pattern(call.views, call.options,
                               [&](const auto& pattern) { detail::backward_by(call, pattern); });
}

}}  // namespace attn::ATTN_ISA
