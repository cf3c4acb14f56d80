// attn: the gradients of sliding_window.
//
//   attn::sliding_window(q, k, v, out, {.left = 128, .right = 0, .lse = lse}, threads);
//   attn::sliding_window_backward(q, k, v, out, d_out, {.q = dq, .k = dk, .v = dv}, {.left = 128, .right = 0, .lse = lse},
//                                 threads);
//
// The formulas are those of full_softmax_backward.hpp, with sums over the keys that a query sees. With q_global,
// k_global and v_global the rows of global queries use these: their rows of dq are 0, and all other rows of the
// gradient of q_global are 0. Shapes, errors, lse and score functions as in full_softmax_backward.hpp.
//
// Cost     2 B H (3 D + 2 Dv) operations for every visible key of a query; without lse, one product more. Scratch, per
//          thread, whatever the length: about (9 (768 + 2 w) + 1800) max(D, Dv) numbers for windows of w keys on each
//          side, above 192 of them 6 w instead of 768 + 2 w, and 7 in place of 9 on one thread; for n global positions
//          n (D + Dv) for each of three parts of 768 positions; where the heads of a group differ in dilation, Lk (D +
//          Dv). For the gradients of relative_bias, relative_keys, position_queries and log_decay as in
//          full_softmax_backward.hpp, the first three for distances within the window, and for every part.
#pragma once

#include <attn/softmax/detail/sliding_window_backward_run.hpp>
#include <attn/softmax/sliding_window.hpp>

namespace attn { inline namespace ATTN_ISA {

/// The gradients sliding_window_backward computes: those given. S is the element type of the call.
template <class S>
struct sliding_window_gradients {
  using real = compute_type<S>;
  static constexpr unsigned shared = detail::fields::k | detail::fields::distances | detail::fields::alibi_slopes;

  view_field<S> q{}, k{}, v{}, q_global{}, k_global{}, v_global{};
  /// As in full_softmax_gradients.
  view_field<real, 2> relative_bias{};
  view_field<real, 3> relative_keys{};
  view_field<S> relative_queries{};
  view_field<real, 3> position_queries{}, log_decay{};
  view_field<real, 1> alibi_slopes{}, sinks{};
  view_field<const real, 3> d_lse{};
  bool accumulate = false;
};

/// The gradients of sliding_window. See the top of the file.
template <viewable Q, viewable K, viewable V, viewable O, viewable D,
          class Options = sliding_window_options<element_of<const Q&>>, class Score = detail::no_score,
          class ScoreBackward = detail::no_score_backward>
void sliding_window_backward(const Q& q, const K& k, const V& v, const O& out, const D& d_out,
                             const sliding_window_gradients<element_of<const Q&>>& gradients, Options&& options = {},
                             Score&& score = {}, ScoreBackward&& score_backward = {}, execution_ref exec = {}) {
  auto call = detail::checked_backward_call<sliding_window_options, detail::invariant_form::rows>(
      "sliding_window_backward", q, k, v, out, d_out, gradients, options, score, score_backward, exec);
  const auto& given = call.options;
  detail::check_window_options(call.views, call.shape, given, call.out);
  call.views.gradient("q_global", gradients.q_global, given.q_global);
  call.views.gradient("k_global", gradients.k_global, given.k_global);
  call.views.gradient("v_global", gradients.v_global, given.v_global);
  detail::run_sliding_window_backward(call, given, gradients);
}

}}  // namespace attn::ATTN_ISA

#define ATTN_RUN(S) void run_sliding_window_backward(softmax_backward_call<S, no_score, no_score_backward>&,           \
  const sliding_window_options<S>&, const sliding_window_gradients<S>&)
#include <attn/core/detail/compiled.hpp>
