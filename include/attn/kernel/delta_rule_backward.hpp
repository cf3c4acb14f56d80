// attn: the gradients of the delta rule.
//
//   attn::delta_rule_backward(q, k, v, d_out, {.q = dq, .k = dk, .v = dv}, {.beta = beta}, threads);
//   attn::delta_rule_backward(q, k, v, d_out, {.beta = db, .log_decay = dg}, {.beta = beta, .log_decay = g});
//   attn::delta_rule_backward(q, k, v, d_out, {.initial_state = ds, .d_final_state = after}, {.initial_state = s});
//
// With R_t the gradient of S_t by all that follows, R_(t-1) = Diag(e^g_t) (I - beta_t k_t k_t^T) R'_t,
// R'_t = R_t + scale q_t d_out_t^T, and u_t = v_t - S'_t^T k_t (delta_rule.hpp):
//   dq_t = scale S_t d_out_t,   dv_t = beta_t R'_t^T k_t,   dbeta_t = u_t.R'_t^T k_t
//   dk_t = beta_t (R'_t u_t - S'_t R'_t^T k_t),   dg_t = e^g_t times the rows of S_(t-1).dL/dS'_t
// by products within chunks as in the forward call: detail/recurrence_backward.hpp. Nothing is divided by a decay; the
// gradient of minus infinity is 0.                                                  Yang et al. 2024; by the chain rule
//
// Shapes   q, k, v and the options as the forward call's, d_out as out. Neither out nor the final state of the forward
//          call is needed. Gradients have the shapes of what they are of; dq and dk are summed over the value heads
//          that share a key head.
// Cost     B Hv L (18 D Dv + 64 (7 D + 6 Dv)) operations, some 3 times the forward call's. Scratch per thread: about 40
//          arrays of 64 x D numbers, D x Dv and 64 x Dv numbers for each 64 tokens up to 16384, a state for each 16384;
//          where value heads share key heads, 2 L D numbers, and threads share no head; elsewhere 80 arrays more where
//          they do: few of them, of 256 tokens or more.
// Throws   as the forward call, and for gradients of what was not given or in memory of an input or another gradient.
#pragma once

#include <attn/kernel/delta_rule.hpp>
#include <attn/kernel/detail/recurrence_backward_run.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct delta_rule_gradients {
  using real = compute_type<S>;

  view_field<S> q{}, k{}, v{};
  view_field<real, 3> beta{};               // [B, Hv, L]
  view_field<real> log_decay{};             // as log_decay: [B, Hv, L, 1 or D]
  view_field<real> initial_state{};         // [B, Hv, D, Dv]
  view_field<const real> d_final_state{};   // an input, as final_state; 0 unless given
  bool accumulate = false;  // add to what is there instead of writing it over

  operator detail::kernel_gradients<S>() const {
    return {.q = q, .k = k, .v = v, .beta = beta, .log_decay = log_decay, .initial_state = initial_state,
            .d_final_state = d_final_state, .accumulate = accumulate};
  }
};

/// The gradients of delta_rule; options and execution may be left out. See the top of the file.
template <viewable Q, viewable K, viewable V, viewable D, class Options = delta_rule_options<element_of<const Q&>>>
void delta_rule_backward(const Q& q, const K& k, const V& v, const D& d_out,
                         const delta_rule_gradients<element_of<const Q&>>& gradients, Options&& options = {},
                         execution_ref exec = {}) {
  using S = element_of<const Q&>;
  const auto& given = detail::options_or_default<delta_rule_options<S>>(options);
  execution& threads = detail::plain_execution_of("delta_rule_backward", exec, options);
  detail::call_views check{"delta_rule_backward"};
  const auto views = detail::backward_views_of<S>(q, k, v, d_out);
  const auto call = detail::check_correcting_backward<detail::rule::correct>(check, views, gradients, given, threads);
  detail::run_recurrence_backward<detail::rule::correct>(call, threads);
}

}}  // namespace attn::ATTN_ISA
