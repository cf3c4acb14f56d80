// attn: FAVOR+, attention with random features of the softmax kernel.
//
//   out_i = phi(q_i)^T sum_j phi(k_j) v_j^T / (phi(q_i)^T sum_j phi(k_j) + eps)
//                           Choromanski et al. 2021, "Rethinking attention with performers"
//   phi(q).phi(k) is, over the drawing of the features W, on average exp(scale q.k); see performer_kernel for phi.
//
//   auto features = attn::draw_features<float>(256, 64, {.seed = 7});
//   attn::performer(q, k, v, out, features);
//   attn::performer(q, k, v, out, features, {.causal = true}, threads);
//
// What to expect: the mean is right, the spread grows like exp of the size of queries and keys. Attention close to
// uniform is approximated well; of the peaky attention of trained models little is left. See README.md.
//
// Shapes   q [B, H, Lq, D], k [B, Hkv, Lk, D], v [B, Hkv, Lk, Dv], out [B, H, Lq, Dv], features
//          [H, Hkv or 1, m, D]; Hkv divides H. float, double, or Eigen::half / Eigen::bfloat16 in memory with float
//          arithmetic and features.
// Cost     2 B L m (D + Dv) (H + Hkv) operations, O(L); causal B H L 64 (m + Dv) more. Scratch: at most about
//          16 m (Dv + 32) numbers a thread, whatever the length; that is where threads share a head. Twice all that for
//          the kernels with two features a row.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
//
// Exponents are held apart, so neither long queries nor long keys overflow or vanish, and causal rows do not change, to
// the last bit, with what comes later. Token by token: performer_state.hpp.
#pragma once

#include <attn/kernel/detail/engine.hpp>
#include <attn/kernel/detail/options.hpp>
#include <attn/kernel/detail/performer_features.hpp>
#include <attn/kernel/draw_features.hpp>

namespace attn::inline ATTN_ISA {

/// Options of performer for elements of type S.
template <class S>
struct performer_options {
  static_assert(element<S>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");
  using real = compute_type<S>;

  performer_kernel kernel = performer_kernel::positive;
  /// Factor of q.k, >= 0; 1 / sqrt(D) unless given.
  std::optional<real> scale{};
  /// Query i stands at i + Lk - Lq (true lengths) and sees the keys up to there.
  bool causal = false;
  /// True lengths, one per batch item: for queries and keys alike, or apart. Rows of padding are 0 in out.
  list_view<index> lengths{}, query_lengths{}, key_lengths{};
  /// Added to the denominator.
  real eps = real(0);
  /// relu: added to each feature; 0.001 unless given. positive, not causal: added to exp(W x~ - |x~|^2 / 2 - max W x~),
  /// the maximum per query and over all keys, as published code does it; 0 unless given. Refused otherwise.
  std::optional<real> feature_eps{};
  /// Subtract the mean key from all of them: softmax stays the same, the spread of the features shrinks. Not causal.
  bool center_keys = false;
};

namespace detail {

/// Everything performer refuses, it refuses here.
template <class S>
std::pair<attention_shape, sequence_lengths> check_performer(const validator& check, const tensor_view<const S>& q,
                                                             const tensor_view<const S>& k,
                                                             const tensor_view<const S>& v, const tensor_view<S>& out,
                                                             const tensor_view<const compute_type<S>, 3>& features,
                                                             const performer_options<S>& options) {
  const attention_shape shape = check_attention(check, q, k, v, out);
  const sequence_lengths lengths = check_lengths(check, shape, options);
  check_features(check, features, shape, out);
  check_eps(check, options.eps);
  if (options.scale) {
    const auto s = static_cast<double>(*options.scale);
    if (!(s >= 0) || s > static_cast<double>(std::numeric_limits<compute_type<S>>::max()))
      check.fail("scale >= 0, and finite", s);
  }
  if (options.feature_eps) {
    check_eps(check, *options.feature_eps, "feature_eps");
    if (*options.feature_eps > 0 && options.kernel != performer_kernel::relu) {
      if (options.kernel != performer_kernel::positive)
        check.fail("feature_eps with kernel positive or relu", "another");
      if (options.causal) check.fail("no causal with feature_eps, which takes a maximum over all keys", "causal");
    }
  }
  if (options.center_keys && options.causal) check.fail("no causal with center_keys, a mean over all keys", "causal");
  return {shape, lengths};
}

/// The map of a call that has passed its checks.
template <class S>
performer_features<S> make_performer_features(const tensor_view<const compute_type<S>, 3>& features,
                                              const performer_options<S>& options, index dim, index heads) {
  using T = compute_type<S>;
  const T scale = options.scale ? *options.scale : dim > 0 ? T(1) / std::sqrt(static_cast<T>(dim)) : T(1);
  const bool relu = options.kernel == performer_kernel::relu;
  const T added = options.feature_eps.value_or(relu ? T(1e-3) : T(0));
  performer_features<S> map(features, options.kernel, scale, added, !relu && added > T(0), heads);
  map.centred = options.center_keys;
  return map;
}

}  // namespace detail

/// FAVOR+ attention; the execution may be left out. See the top of the file.
template <viewable Q, viewable K, viewable V, viewable O>
void performer(const Q& q, const K& k, const V& v, O&& out,
               const std::type_identity_t<tensor_view<const compute_type<element_of<const Q&>>, 3>>& features,
               const performer_options<element_of<const Q&>>& options, execution& exec) {
  detail::require_one_element_type<const Q&, const K&, const V&, O>();
  using S = element_of<const Q&>;
  const tensor_view<const S> queries = as_view(q), keys = as_view(k), values = as_view(v);
  const tensor_view<S> to = as_view(out);
  const auto [shape, lengths] =
      detail::check_performer(detail::validator("performer"), queries, keys, values, to, features, options);
  const index heads = detail::heads_of_sums(shape, {features.extent(0)});
  auto map = detail::make_performer_features<S>(features, options, shape.dim, heads);
  map.k = keys;
  const detail::sequence_lengths known = lengths;
  map.lengths = &known;
  detail::kernel_call<S>{queries,
                         keys,
                         values,
                         to,
                         shape,
                         lengths,
                         map,
                         heads,
                         options.causal,
                         true,
                         map.published ? options.eps * static_cast<compute_type<S>>(features.extent(1)) : options.eps}
      .run(exec);
}

template <viewable Q, viewable K, viewable V, viewable O>
void performer(const Q& q, const K& k, const V& v, O&& out,
               const std::type_identity_t<tensor_view<const compute_type<element_of<const Q&>>, 3>>& features,
               const performer_options<element_of<const Q&>>& options = {}) {
  execution serial;
  performer(q, k, v, out, features, options, serial);
}

}  // namespace attn
