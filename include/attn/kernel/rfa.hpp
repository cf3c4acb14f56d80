// attn: random feature attention.
//
//   out_i = phi(q_i)^T S / (phi(q_i)^T z + eps),  phi(x) = [sin W x^, cos W x^],  x^ = x / (|x| + norm_eps)
//                                                   Peng et al. 2021, "Random feature attention"
//   S, z as in linear.hpp; with a gate g: S_t = g_t S_(t-1) + (1 - g_t) phi(k_t) v_t^T, z likewise
//
//   auto features = attn::draw_features<float>(256, 64, {.seed = 7}); // a temperature is a factor of the features
//   attn::rfa(q, k, v, out, features, {.causal = true, .gate = g});
//
// Shapes   q [B, H, Lq, D], k [B, Hkv, Lk, D], v [B, Hkv, Lk, Dv], out [B, H, Lq, Dv], features [H, Hkv or 1, m, D];
//          Hkv divides H. float, double, or Eigen::half / Eigen::bfloat16 in memory with float sums, features of bf16
//          being rounded to bf16 where the processor multiplies those.
// Cost     2 B L m (D + 2 Dv) (H + Hkv) operations, O(L); causal B H L 64 (2m + Dv) more. Scratch: at most about 32 m
//          (Dv + 32) numbers per thread, independent of the length; the most is needed where threads share heads.
// Values   `out` is finite where the sums before its division are in the range of the compute type (float: 3.4e38).
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
//
// Weights may be negative, and a denominator near 0 makes a row large; this is a property of the method, not of
// rounding. A token of zeros with norm_eps 0 stays zeros. Tokens may have any length: no square overflows. Token by
// token: rfa_step.hpp.
#pragma once

#include <attn/kernel/detail/kernel_checks.hpp>
#include <attn/kernel/detail/rfa_features.hpp>
#include <attn/kernel/detail/sums_run.hpp>
#include <attn/kernel/draw_features.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct rfa_options {
  using real = compute_type<S>;

  bool causal = false;  // query i is at position i + Lk - Lq (true lengths) and sees the keys up to there
  /// True lengths, one per batch item: for queries and keys alike, or separately. Rows of padding are 0 in out.
  list_view<idx_t> lengths{}, query_lengths{}, key_lengths{};
  real eps = real(0);  // added to the denominator
  real norm_eps = real(0);  // added to the norm of a token before dividing by it; the original uses 0.001
  view_field<const real, 3> gate{};   // per token, from 0 to 1: [B, H or Hkv, Lk]; causal only
  /// [B or 1, Lk] of bool or bytes; false for a key that adds nothing to the sums, whatever it is. Its gate applies.
  key_mask_view key_mask{};

  operator detail::kernel_parameters<real>() const {
    return {.both_lengths = lengths, .query_lengths = query_lengths, .key_lengths = key_lengths, .causal = causal,
            .eps = eps, .norm_eps = norm_eps, .gate = gate, .complement = true, .key_mask = key_mask};
  }
};

/// Random feature attention; options and execution may each be left out. See the top of the file.
template <viewable Q, viewable K, viewable V, viewable O, class Features = rfa_options<element_of<const Q&>>,
          class Options = rfa_options<element_of<const Q&>>>
void rfa(const Q& q, const K& k, const V& v, O&& out, const Features& features = {}, Options&& options = {},
         execution_ref exec = {}) {
  using S = element_of<const Q&>;
  const auto& given = detail::options_or_default<rfa_options<S>>(options);
  detail::call_views check{"rfa"};
  auto call = detail::check_kernel(check, detail::with_features(detail::views_of<S>(q, k, v, out), features), given);
  detail::rfa_features<compute_type<S>> map(call);
  call.map = &map;
  detail::run_sums(call, detail::plain_execution_of("rfa", exec, options));
}

}}  // namespace attn::ATTN_ISA
