// attn: linear attention.
//
//   out_i = phi(q_i)^T S / (phi(q_i)^T z + eps),  S = sum_j phi(k_j) v_j^T,  z = sum_j phi(k_j)
//                                     Katharopoulos et al. 2020, "Transformers are RNNs", phi = elu + 1
//   causal: the sums run over j <= i (+ Lk - Lq); with decay g: S_t = g_t S_(t-1) + phi(k_t) v_t^T, z likewise; with
//   log_decay, S_t = Diag(e^g_t) S_(t-1) + phi(k_t) v_t^T; with bonus u, out_t reads S_(t-1) + Diag(u) phi(k_t) v_t^T
//       RetNet, Sun 2023; GLA, Yang 2023; RWKV-6, Peng 2024; Mamba-2, Dao 2024: written as include/attn/README.md says
//
//   attn::linear(q, k, v, out);                                 // Eigen matrices [length, dim]: one head
//   attn::linear(q, k, v, out, {.causal = true}, threads);
//   attn::linear(q, k, v, out, {}, attn::feature_maps::relu{});            // other feature maps: feature_maps.hpp
//   attn::linear(q, k, v, out, {.causal = true, .decay = g}, [](float x) { return x * x; });
//
// Shapes   q [B, H, Lq, D], k [B, Hkv, Lk, D], v [B, Hkv, Lk, Dv], out [B, H, Lq, Dv]; Hkv divides H. float, double, or
//          Eigen::half / Eigen::bfloat16 in memory with float sums, features of bf16 being rounded to bf16 where the
//          processor multiplies those; decays, bonus and states are float or double.
// Cost     2 B (H + Hkv) L D Dv operations, O(L); causal B H L 64 (D + Dv) more. Scratch: a few times (D + 64)(Dv + 64)
//          numbers per thread, independent of the length; where heads are no multiple of the threads, which then share
//          them, at most 10 states of (D + 1) Dv more. With a scale, a mask or states a call takes 1.1 times as long,
//          with decays per channel 1.3 to 1.6 times, and threads do not share heads.
// Values   `out` is finite where the sums before its division are in the range of the compute type (float: 3.4e38).
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
//
// A denominator of 0 (or less than 16 times the smallest normal number) gives zeros. Features are not rescaled: where
// phi(q).z leaves the range of numbers, in float from |q| |k| Lk of about 1e38 on, so does the result (NaN). Token by
// token: linear_step.hpp. Sums over long sequences err by less than 1e-5 of them in float over 524288 tokens; with a
// scale, bonus, decays per channel or initial sums they are rounded every 64 tokens, each time by up to 2^-24.
#pragma once

#include <attn/kernel/detail/linear_checks.hpp>
#include <attn/kernel/detail/kernel_step_run.hpp>
#include <attn/kernel/feature_maps.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct linear_options {
  using real = compute_type<S>;

  bool causal = false;  // query i is at position i + Lk - Lq (true lengths) and sees the keys up to there
  /// True lengths, one per batch item: for queries and keys alike, or separately. Rows of padding are 0 in out.
  list_view<idx_t> lengths{}, query_lengths{}, key_lengths{};
  real eps = real(1e-6);  // added to the denominator
  bool normalise = true;  // whether to divide by phi(q).z + eps
  view_field<const real, 3> decay{};   // decay of the sums before a token, from 0 to 1: [B, H or Hkv, Lk]; causal only
  real scale = real(1);                // factor of phi(q)
  /// In place of decay its logarithm, <= 0, -infinity included: per token [B, H or Hkv, Lk, 1], or per feature [.., D].
  /// Per token the two are the same; decay has a gradient where it is 0, too, and is multiplied as it is.
  view_field<const real> log_decay{};
  view_field<const real, 2> bonus{};   // u [H, D]; causal only
  /// [B or 1, Lk] of bool or bytes; false for a key that adds nothing to the sums. Its decay applies.
  key_mask_view key_mask{};
  /// S [B, H or Hkv, D, Dv] and z [B, H or Hkv, D] before the first key (0 unless given) and after the last one
  /// (written if given, to separate memory). Where decays or one of these are per query head, so are the sums: the
  /// final ones must then be per query head, and initial ones per key head apply to all query heads of their group.
  view_field<const real> initial_state{};
  view_field<const real, 3> initial_weights{};
  view_field<real> final_state{};
  view_field<real, 3> final_weights{};

  operator detail::kernel_parameters<real>() const {
    return {.both_lengths = lengths, .query_lengths = query_lengths, .key_lengths = key_lengths, .causal = causal,
            .normalise = normalise, .eps = eps, .gate = decay, .key_mask = key_mask,
            .recurrence = {.scale = scale, .log_decay = log_decay, .bonus = bonus, .initial_state = initial_state,
                           .initial_weights = initial_weights, .final_state = final_state,
                           .final_weights = final_weights}};
  }
};

/// Linear attention; options, feature map and execution may each be left out. See the top of the file.
template <viewable Q, viewable K, viewable V, viewable O, class Options = linear_options<element_of<const Q&>>,
          class Map = feature_maps::elu_plus_one>
void linear(const Q& q, const K& k, const V& v, O&& out, Options&& options = {}, Map&& map = {},
            execution_ref exec = {}) {
  using S = element_of<const Q&>;
  const auto& given = detail::options_or_default<linear_options<S>>(options);
  const auto& feature = detail::callable_or_default<feature_maps::elu_plus_one>(map);
  if constexpr (detail::require_feature_map<decltype(feature), compute_type<S>>()) {
    detail::call_views check{"linear"};
    auto call = detail::check_kernel(check, detail::views_of<S>(q, k, v, out), given);
    auto features = detail::map_features<S>(feature, call.shape.dim);
    detail::check_linear(check, call, features.features);
    call.map = &features;
    execution& threads = detail::execution_of(exec, options, map);
    detail::check_invariant_tokens(check, call, threads);
    detail::run_linear(call, threads);
  }
}

}}  // namespace attn::ATTN_ISA

#define ATTN_RUN_IN(T) void run_linear(const kernel_call<T>&, execution&)
#include <attn/core/detail/compiled.hpp>
