// attn: the delta rule: linear attention whose state corrects the value it has stored for a key, instead of adding to
// it.
//
//   S'_t = Diag(e^g_t) S_(t-1),   S_t = S'_t + beta_t k_t (v_t - S'_t^T k_t)^T,   out_t = scale S_t^T q_t
//       DeltaNet, Yang et al. 2024; Gated DeltaNet, Yang et al. 2025 (a decay per token, as in Qwen3-Next); KDA, Kimi
//       Linear 2025 (one per channel). No normaliser, no feature map
//
//   attn::delta_rule(q, k, v, out, {.beta = beta}, threads);
//   attn::delta_rule(q, k, v, out, {.beta = beta, .log_decay = g, .unit_norm_eps = 1e-6f});
//   attn::delta_rule(q, k, v, out, {.beta = beta, .initial_state = before, .final_state = after});
//
// Shapes   q, k [B, Hk, L, D], v, out [B, Hv, L, Dv]; Hk divides Hv, value head h reads q and k of head h Hk / Hv.
//          float, double, or Eigen::half / Eigen::bfloat16 in memory with float arithmetic; beta, decays and states are
//          float or double. Always causal.
// Cost     B Hv L (6 D Dv + 64 (4 D + 2 Dv)) operations, O(L): products within chunks of 64 tokens, a triangular solve,
//          one state between chunks. Scratch per thread: some 15 arrays of 64 x D numbers and a state, independent of
//          the length; 20 more where threads share heads: few of them, of 256 tokens or more.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
//
// The state stays bounded where beta |k|^2 is from 0 to 2; beyond that it grows from token to token, by the formula. It
// is rounded every 64 tokens, by up to 2^-24 of it in float. Token by token: delta_rule_step.hpp.
#pragma once

#include <attn/kernel/detail/correcting_step_run.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct delta_rule_options {
  using real = compute_type<S>;

  std::optional<real> scale{};  // factor of out; 1 / sqrt(D) unless given
  list_view<idx_t> lengths{};                // true lengths, one per batch item; rows of padding are 0 in out
  view_field<const real, 3> beta{};          // how much of the difference is written, [B, Hv, L]; 1 unless given
  view_field<const real> log_decay{};        // g <= 0, -infinity included: per token [B, Hv, L, 1] or channel [.., D]
  key_mask_view key_mask{};                  // [B or 1, L] of bool or bytes; false for a key that writes nothing
  view_field<const real> initial_state{};    // S_0 [B, Hv, D, Dv]; 0 unless given
  view_field<real> final_state{};            // written if given: the state after the true length
  std::optional<real> unit_norm_eps{};  // if given, q and k are first divided by sqrt(|row|^2 + unit_norm_eps); > 0

  operator detail::kernel_parameters<real>() const {
    return {.both_lengths = lengths, .key_mask = key_mask, .given_scale = scale, .given_unit_norm_eps = unit_norm_eps,
            .recurrence = {.log_decay = log_decay, .beta = beta, .initial_state = initial_state,
                           .final_state = final_state}};
  }
};

/// The delta rule; options and execution may be left out. See the top of the file.
template <viewable Q, viewable K, viewable V, viewable O, class Options = delta_rule_options<element_of<const Q&>>>
void delta_rule(const Q& q, const K& k, const V& v, O&& out, Options&& options = {}, execution_ref exec = {}) {
  using S = element_of<const Q&>;
  const auto& given = detail::options_or_default<delta_rule_options<S>>(options);
  execution& threads = detail::execution_of(exec, options);
  detail::call_views check{"delta_rule"};
  const auto views = detail::views_of<S>(q, k, v, out);
  detail::run_delta_rule(detail::check_correcting<detail::rule::correct>(check, views, given, threads), threads);
}

}}  // namespace attn::ATTN_ISA
