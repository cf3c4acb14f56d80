// attn: the generalised delta rule: linear attention whose state is multiplied with a diagonal plus low rank matrix.
//
//   S_t = Diag(e^g_t) S_(t-1) + b_t (a_t^T S_(t-1)) + k_t v_t^T,   out_t = scale S_t^T q_t
//       RWKV-7, Peng et al. 2025; no normaliser, no feature map. a reads the state before the decay of its token
//
//   attn::dplr(q, k, v, a, b, out, {.log_decay = g}, threads);
//   attn::dplr(r, k, v, a, b, out, {.scale = 1, .log_decay = w, .initial_state = before, .final_state = after});
//
// Models that are special cases (x y is taken element by element):
//
//   RWKV-7                 a = -kappa^, b = kappa^ a_t, scale 1      kappa^ of unit norm, a_t its in-context rate
//   KDA, Gated DeltaNet    a = e^g k, b = -beta k, v = beta v        but delta_rule takes two thirds of the time
//   Comba                  a = e^g p, b = -beta k, v = beta v
//   GDN-2                  a = e^g b k, b = -k, v = w v
//
// Delta products, several corrections a token, are sub-tokens: include/attn/README.md.
//
// Shapes   q, k, a, b [B, H, L, D], v, out [B, H, L, Dv]. float, double, or Eigen::half / Eigen::bfloat16 in memory
//          with float arithmetic; decays and states are float or double. Always causal.
// Cost     B H L (8 D Dv + 64 (8 D + 4 Dv)) operations, O(L): products within chunks of 64 tokens, a triangular solve,
//          one state between chunks. Scratch per thread: some 30 arrays of 64 x D numbers and a state, independent of
//          the length; 40 more where threads share heads: few of them, of 256 tokens or more.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
//
// The state stays bounded where Diag(e^g) + b a^T makes no vector longer, as in the models above; otherwise it may grow
// from token to token, by the formula. It is rounded every 64 tokens, by up to 2^-24 of it in float.
// Token by token: dplr_step.hpp.
#pragma once

#include <attn/kernel/detail/correcting_checks.hpp>
#include <attn/kernel/detail/recurrence_run.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct dplr_options {
  using real = compute_type<S>;

  std::optional<real> scale{};  // factor of out; 1 / sqrt(D) unless given
  list_view<idx_t> lengths{};                // true lengths, one per batch item; rows of padding are 0 in out
  view_field<const real> log_decay{};        // g <= 0, -infinity included: per token [B, H, L, 1] or channel [.., D]
  key_mask_view key_mask{};                  // [B or 1, L] of bool or bytes; false for a k and b taken as 0
  view_field<const real> initial_state{};    // S_0 [B, H, D, Dv]; 0 unless given
  view_field<real> final_state{};            // written if given: the state after the true length

  operator detail::kernel_parameters<real>() const {
    return {.both_lengths = lengths, .key_mask = key_mask, .given_scale = scale,
            .recurrence = {.log_decay = log_decay, .initial_state = initial_state, .final_state = final_state}};
  }
};

/// The generalised delta rule; options and execution may be left out. See the top of the file.
template <viewable Q, viewable K, viewable V, viewable A, viewable B, viewable O,
          class Options = dplr_options<element_of<const Q&>>>
void dplr(const Q& q, const K& k, const V& v, const A& a, const B& b, O&& out, Options&& options = {},
          execution_ref exec = {}) {
  using S = element_of<const Q&>;
  const auto& given = detail::options_or_default<dplr_options<S>>(options);
  execution& threads = detail::plain_execution_of("dplr", exec, options);
  detail::call_views check{"dplr"};
  const auto views = detail::with_rows(detail::views_of<S>(q, k, v, out), a, b);
  detail::run_dplr(detail::check_correcting<detail::rule::low_rank>(check, views, given, threads), threads);
}

}}  // namespace attn::ATTN_ISA
