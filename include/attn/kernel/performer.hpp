// attn: FAVOR+, attention with random features of the softmax kernel.
//
//   out_i = phi(q_i)^T sum_j phi(k_j) v_j^T / (phi(q_i)^T sum_j phi(k_j) + eps)
//                           Choromanski et al. 2021, "Rethinking attention with performers"
//   The mean of phi(q).phi(k) over random features W is exp(scale q.k); see performer_kernel for phi.
//
//   auto features = attn::draw_features<float>(256, 64, {.seed = 7});
//   attn::performer(q, k, v, out, features);
//   attn::performer(q, k, v, out, features, {.causal = true}, threads);
//
// Accuracy: the estimate is unbiased, and its variance grows exponentially with the norms of queries and keys.
// Attention close to uniform is approximated well, the peaky attention of trained models badly: see bench/README.md.
//
// Shapes   q [B, H, Lq, D], k [B, Hkv, Lk, D], v [B, Hkv, Lk, Dv], out [B, H, Lq, Dv], features [H, Hkv or 1, m, D];
//          Hkv divides H. float, double, or Eigen::half / Eigen::bfloat16 in memory with float sums, features of bf16
//          being rounded to bf16 where the processor multiplies those.
// Cost     2 B L m (D + Dv) (H + Hkv) operations, O(L); causal B H L 64 (m + Dv) more. Scratch: at most about
//          16 m (Dv + 32) numbers per thread, independent of the length; the most is needed where threads share heads.
//          Twice as much of everything for the kernels with two features per row.
// Values   `out` is finite where the sums before its division are in the range of the compute type (float: 3.4e38).
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
//
// Exponents are stored separately, so neither long queries nor long keys overflow or underflow, and later tokens change
// no bit of causal rows. A key counts as 0 where its squares overflow (norm 1e19 in float), with [sin, cos] as one of
// the longest. Features of relu are plain numbers: where phi(q).z overflows, in float from |q| |k| Lk of about 1e37 on
// (|q| counts as 1e29 at most), the row is NaN. Token by token: performer_step.hpp.
#pragma once

#include <attn/kernel/detail/performer_features.hpp>
#include <attn/kernel/detail/sums_run.hpp>
#include <attn/kernel/draw_features.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct performer_options {
  using real = compute_type<S>;

  std::optional<real> scale{};  // factor of q.k, >= 0; 1 / sqrt(D) unless given
  bool causal = false;  // query i is at position i + Lk - Lq (true lengths) and sees the keys up to there
  /// True lengths, one per batch item: for queries and keys alike, or separately. Rows of padding are 0 in out.
  list_view<idx_t> lengths{}, query_lengths{}, key_lengths{};
  performer_kernel kernel = performer_kernel::positive;
  real eps = real(0);  // added to the denominator
  /// relu: added to each feature; 0.001 unless given. positive, not causal: added to exp(W x~ - |x~|^2 / 2 - max W x~),
  /// the maximum being taken per query and over all keys, as in published code; 0 unless given. Throws in all other
  /// cases.
  std::optional<real> feature_eps{};
  bool center_keys = false;  // subtract the mean key from all: same softmax, features of less spread; not causal
  /// [B or 1, Lk] of bool or bytes; false for a key that adds nothing to sums, maxima and the mean key, whatever it is.
  key_mask_view key_mask{};

  operator detail::kernel_parameters<real>() const {
    return {.both_lengths = lengths, .query_lengths = query_lengths, .key_lengths = key_lengths, .causal = causal,
            .eps = eps, .key_mask = key_mask, .given_scale = scale, .feature_eps = feature_eps, .kernel = kernel,
            .center_keys = center_keys};
  }
};

/// FAVOR+ attention; options and execution may each be left out. See the top of the file.
template <viewable Q, viewable K, viewable V, viewable O, class Features = performer_options<element_of<const Q&>>,
          class Options = performer_options<element_of<const Q&>>>
void performer(const Q& q, const K& k, const V& v, O&& out, const Features& features = {}, Options&& options = {},
               execution_ref exec = {}) {
  using S = element_of<const Q&>;
  const auto& given = detail::options_or_default<performer_options<S>>(options);
  detail::call_views check{"performer"};
  auto call = detail::check_kernel(check, detail::with_features(detail::views_of<S>(q, k, v, out), features), given);
  detail::performer_features<compute_type<S>> map(call);
  call.map = &map;
  detail::run_sums(call, detail::plain_execution_of("performer", exec, options));
}

}}  // namespace attn::ATTN_ISA
