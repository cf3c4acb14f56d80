// attn: the gradients of the generalised delta rule.
//
//   attn::dplr_backward(q, k, v, a, b, d_out, {.q = dq, .k = dk, .v = dv, .a = da, .b = db}, {.log_decay = g});
//   attn::dplr_backward(q, k, v, a, b, d_out, {.initial_state = ds, .d_final_state = after}, {.initial_state = s});
//
// With R_t the gradient of S_t by all that follows, R'_t = R_t + scale q_t d_out_t^T, w_t = S_(t-1)^T a_t and
// z_t = R'_t^T b_t, R_(t-1) = Diag(e^g_t) R'_t + a_t z_t^T:
//   dq_t = scale S_t d_out_t,   dv_t = R'_t^T k_t,   dk_t = R'_t v_t,   db_t = R'_t w_t,   da_t = S_(t-1) z_t
//   dg_t = e^g_t times the rows of S_(t-1).R'_t
// by products within chunks as in the forward call: detail/recurrence_backward.hpp. Nothing is divided by a decay; the
// gradient of minus infinity is 0.                                                  Peng et al. 2025; by the chain rule
//
// Shapes   q, k, v, a, b and the options as the forward call's, d_out as out. Neither out nor the final state of the
//          forward call is needed. Gradients have the shapes of what they are of.
// Cost     B H L (26 D Dv + 64 (14 D + 12 Dv)) operations, some 3 times the forward call's. Scratch per thread: some
//          60 arrays of 64 x D numbers, D x Dv and 64 x Dv for each 64 tokens up to 16384, a state for each 16384; 100
//          arrays more where threads share heads: few of them, of 256 tokens or more.
// Throws   as the forward call, and for gradients of what was not given or in memory of an input or another gradient.
#pragma once

#include <attn/kernel/detail/recurrence_backward_run.hpp>
#include <attn/kernel/dplr.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct dplr_gradients {
  using real = compute_type<S>;

  view_field<S> q{}, k{}, v{}, a{}, b{};
  view_field<real> log_decay{};             // as log_decay: [B, H, L, 1 or D]
  view_field<real> initial_state{};         // [B, H, D, Dv]
  view_field<const real> d_final_state{};   // an input, as final_state; 0 unless given
  bool accumulate = false;  // add to what is there instead of writing it over

  operator detail::kernel_gradients<S>() const {
    return {.q = q, .k = k, .v = v, .a = a, .b = b, .log_decay = log_decay, .initial_state = initial_state,
            .d_final_state = d_final_state, .accumulate = accumulate};
  }
};

/// The gradients of dplr; options and execution may be left out. See the top of the file.
template <viewable Q, viewable K, viewable V, viewable A, viewable B, viewable D,
          class Options = dplr_options<element_of<const Q&>>>
void dplr_backward(const Q& q, const K& k, const V& v, const A& a, const B& b, const D& d_out,
                   const dplr_gradients<element_of<const Q&>>& gradients, Options&& options = {},
                   execution_ref exec = {}) {
  using S = element_of<const Q&>;
  const auto& given = detail::options_or_default<dplr_options<S>>(options);
  execution& threads = detail::plain_execution_of("dplr_backward", exec, options);
  detail::call_views check{"dplr_backward"};
  const auto views = detail::with_rows(detail::backward_views_of<S>(q, k, v, d_out), a, b);
  const auto call = detail::check_correcting_backward<detail::rule::low_rank>(check, views, gradients, given, threads);
  detail::run_recurrence_backward<detail::rule::low_rank>(call, threads);
}

}}  // namespace attn::ATTN_ISA
