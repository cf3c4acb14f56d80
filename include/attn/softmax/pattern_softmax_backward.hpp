// attn: the gradients of pattern_softmax.
//
//   attn::pattern_softmax(q, k, v, out, pattern, {.lse = lse});
//   attn::pattern_softmax_backward(q, k, v, out, pattern, d_out, {.q = dq, .k = dk, .v = dv}, {.lse = lse});
//
// The formulas of full_softmax_backward.hpp, over the keys that the pattern lets a query see. Shapes, errors, lse and
// score functions as there.
//
// Cost     2 (3 D + 2 Dv) operations for every visible key of a query; without lse, one product more. Scratch, per key
//          head in progress: about Lk (3 D + 2 Dv) numbers, up to Lk (6 D + 5 Dv) for long sequences, and Lq D for
//          joined patterns; per thread the keys of a query set, as forward; with drelative_bias lists of 2R + 1 doubles
//          for each head and task; never Lq x Lk.
#pragma once

#include <attn/softmax/detail/pattern_softmax_backward_run.hpp>
#include <attn/softmax/pattern_softmax.hpp>

namespace attn { inline namespace ATTN_ISA {

/// The gradients pattern_softmax_backward computes: q, k, v, relative_bias, alibi_slopes, sinks, d_lse, accumulate.
template <class S>
using pattern_softmax_gradients = pattern_gradients<S>;

/// The gradients of pattern_softmax. See the top of the file.
template <viewable Q, viewable K, viewable V, viewable O, class Pattern, viewable D,
          class Options = pattern_softmax_options<element_of<const Q&>>, class Score = detail::no_score,
          class ScoreBackward = detail::no_score_backward>
void pattern_softmax_backward(const Q& q, const K& k, const V& v, const O& out, const Pattern& pattern, const D& d_out,
                              const pattern_softmax_gradients<element_of<const Q&>>& gradients, Options&& options = {},
                              Score&& score = {}, ScoreBackward&& score_backward = {}, execution_ref exec = {}) {
  static_assert(key_pattern<Pattern>,
                "attn: a pattern has query_sets(shape), queries(shape, set) and keys(shape, set, see): pattern.hpp");
  auto call = detail::checked_backward_call<pattern_softmax_options>("pattern_softmax_backward", q, k, v, out, d_out,
                                                                     gradients, options, score, score_backward, exec);
  detail::run_pattern_softmax_backward(call, detail::patterns_of(pattern));
}

}}  // namespace attn::ATTN_ISA
