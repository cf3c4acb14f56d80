// attn: the gradients of full_softmax.
//
//   attn::full_softmax(q, k, v, out, {.causal = true, .lse = lse}, threads);
//   attn::full_softmax_backward(q, k, v, out, d_out, {.q = dq, .k = dk, .v = dv}, {.causal = true, .lse = lse}, threads);
//   attn::full_softmax_backward(q, k, v, out, d_out, {.q = dq}, {}, score, score_backward);    // with a score function
//
// With P_ij = e^(s_ij - lse_i) and D_i = d_out_i . out_i - d_lse_i, s the final scores:
//   dv_j = sum_i P_ij d_out_i,  ds_ij = P_ij (d_out_i . v_j - D_i),  dq_i = scale sum_j ds'_ij k_j,
//   dk_j = scale sum_i ds'_ij q_i, ds' = ds times the derivative of softcap and score function; dbias_ij = ds_ij before
//   softcap's, drelative_bias its sums over the pairs of a distance, dlog_decay_t its sum over the pairs j < t <= p_i;
//   drelative_queries_i = scale sum_j ds'_ij r[j - p_i], drelative_keys = scale times the sums of ds'_ij q'_i by
//   distance, likewise dposition_queries of ds'_ij k_j, whose dk_j also has scale sum_i ds'_ij r'[j - p_i]; dsink =
//   -sum_i e^(sink - lse_i) D_i. With dropout P_ij m_ij / (1 - rate) in dv, d_out_i . v_j times the same in ds.
//                                                            Dao et al. 2022, "FlashAttention", appendix B
//
// Shapes   q, k, v, out, the options: as the forward call's; out and options.lse are what it wrote. d_out as out,
//          d_lse as lse. Gradients have the shapes of what they are of; those of keys and values are summed over the
//          query heads of a group, dbias over what bias was broadcast over.
// Cost     2 B H Lq Lk (3 D + 2 Dv) operations, half of it when causal; without lse, or where tiles may be left out
//          (skipped_tiles.hpp), one product more. Scratch, per key
//          head in progress: about Lk (3 D + 2 Dv) + Lq (4 D + 2 Dv) numbers, with threads that share a head up to 7 Lq
//          D more, with more than 32768 queries Lk (D + Dv); for drelative_bias and dlog_decay up to B H + 8 lists of
//          2R + 1 and of Lq + Lk doubles, for drelative_keys and dposition_queries as many tables of (2R + 1) D numbers
//          each, R up to Lq + Lk; never Lq x Lk.
// Throws   std::invalid_argument for shapes or options that do not fit, for gradients of what was not given or that
//          share memory with an input or one another, before anything is written.
//
// A row that sees no key has gradient 0. score_backward(s, d, batch, head, i, j) gives d times the derivative of
// score(s, batch, head, i, j) by s. It is called at most once a pair that is seen, and not where d is 0, by any thread.
//
// Where lse is given, its rounding, |lse| 2^-24 in float (double: 2^-53), is an error of the weights. Where it is not,
// it is computed again in more digits than one number has: leave it out where scores exceed 1e4.
//
// ds has the error of `out`, by D, and that of d_out_i . v_j; where one key has nearly all of the weight, these cancel.
// Over 524288 keys of which one has .99 of the weight, values of one size, dq and dk err in float by less than 2e-5 of
// their largest (`out`: 2e-7). With normal values and gradients of 64 dimensions they err by 1e-4, no less where `out`
// is exact.
#pragma once

#include <attn/softmax/detail/full_softmax_backward_run.hpp>
#include <attn/softmax/full_softmax.hpp>

namespace attn { inline namespace ATTN_ISA {

/// The gradients full_softmax_backward computes: those given. S is the element type of the call.
template <class S>
struct full_softmax_gradients {
  using real = compute_type<S>;
  static constexpr unsigned shared = detail::fields::k | detail::fields::bias | detail::fields::distances |
                                     detail::fields::alibi_slopes;

  view_field<S> q{}, k{}, v{};
  /// As bias: [B or 1, H or 1, Lq or 1, Lk], summed over what it is broadcast over.
  view_field<real> bias{};
  /// As relative_bias: [H or 1, 2R + 1].
  view_field<real, 2> relative_bias{};
  /// As relative_keys, [H or 1, 2R + 1, D], and relative_queries, [B, H, Lq, D].
  view_field<real, 3> relative_keys{};
  view_field<S> relative_queries{};
  /// As position_queries: [H or 1, 2R + 1, D].
  view_field<real, 3> position_queries{};
  /// As log_decay: [B, H, Lk].
  view_field<real, 3> log_decay{};
  /// [H]
  view_field<real, 1> alibi_slopes{}, sinks{};
  /// Read, not written: the gradient of lse, [B, H, Lq].
  view_field<const real, 3> d_lse{};
  /// Add to what is there instead of writing it over.
  bool accumulate = false;
};

/// The gradients of full_softmax. See the top of the file.
template <viewable Q, viewable K, viewable V, viewable O, viewable D,
          class Options = full_softmax_options<element_of<const Q&>>, class Score = detail::no_score,
          class ScoreBackward = detail::no_score_backward>
void full_softmax_backward(const Q& q, const K& k, const V& v, const O& out, const D& d_out,
                           const full_softmax_gradients<element_of<const Q&>>& gradients, Options&& options = {},
                           Score&& score = {}, ScoreBackward&& score_backward = {}, execution_ref exec = {}) {
  auto call = detail::checked_backward_call<full_softmax_options, detail::invariant_form::rows>(
      "full_softmax_backward", q, k, v, out, d_out, gradients, options, score, score_backward, exec);
  detail::run_full_softmax_backward(call);
}

}}  // namespace attn::ATTN_ISA
