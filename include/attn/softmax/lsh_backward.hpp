// attn: the gradients of lsh.
//
//   attn::lsh(q, v, out, {.rounds = 4, .buckets = 64, .seed = 7, .lse = lse});
//   attn::lsh_backward(q, v, out, d_out, {.q = dq, .v = dv}, {.rounds = 4, .buckets = 64, .seed = 7, .lse = lse});
//
// The formulas of full_softmax_backward.hpp over the visible keys of lsh.hpp; a key seen in several rounds counts in
// each. Buckets and order are constants, computed again as in the forward call. k = f q, f = 1 / |q| (or 1 / sqrt(|q|^2
// + D norm_eps)):
//   dq_i = scale (sum_j ds'_ij k_j + f_i (g_i - k_i (k_i . g_i))),   g_j = sum_i ds'_ij q_i
//
// Shapes, errors, lse and score functions as in full_softmax_backward.hpp. Where |q| counts as 0 the key is 0 and has
// no gradient.
//
// Cost     B H L rounds (4 chunk (3 D + 2 Dv) + D buckets) operations; without lse, those of the forward call without
//          values too. Scratch: L (2 D + Dv + 4 rounds) numbers and the packed rotations for every key head in
//          progress, and the keys of 512 tokens, or more for long chunks, per thread.
#pragma once

#include <attn/softmax/detail/lsh_backward_run.hpp>
#include <attn/softmax/lsh.hpp>

namespace attn { inline namespace ATTN_ISA {

/// The gradients lsh_backward computes: those given. S is the element type of the call.
template <class S>
struct lsh_gradients {
  using real = compute_type<S>;
  static constexpr unsigned shared = detail::fields::alibi_slopes;

  view_field<S> q{}, v{};
  /// As in softmax_gradients.
  view_field<real, 1> alibi_slopes{}, sinks{};
  view_field<const real, 3> d_lse{};
  bool accumulate = false;
};

/// The gradients of lsh. See the top of the file.
template <viewable Q, viewable V, viewable O, viewable D, class Options = lsh_options<element_of<const Q&>>,
          class Score = detail::no_score, class ScoreBackward = detail::no_score_backward>
void lsh_backward(const Q& q, const V& v, const O& out, const D& d_out,
                  const lsh_gradients<element_of<const Q&>>& gradients, Options&& options = {}, Score&& score = {},
                  ScoreBackward&& score_backward = {}, execution_ref exec = {}) {
  const auto keys = detail::lsh_keys("lsh_backward", q, v);
  auto call = detail::checked_backward_call<lsh_options>("lsh_backward", q, keys, v, out, d_out, gradients, options,
                                                         score, score_backward, exec);
  detail::set_lsh_options(call.views, call.forward, call.options);
  detail::run_lsh_backward(call, call.options);
}

}}  // namespace attn::ATTN_ISA

#define ATTN_RUN(S) void run_lsh_backward(softmax_backward_call<S, no_score, no_score_backward>&, const lsh_options<S>&)
#include <attn/core/detail/compiled.hpp>
