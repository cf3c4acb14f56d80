// attn: linear attention.
//
//   out_i = phi(q_i)^T S / (phi(q_i)^T z + eps),  S = sum_j phi(k_j) v_j^T,  z = sum_j phi(k_j)
//                                     Katharopoulos et al. 2020, "Transformers are RNNs", phi = elu + 1
//   causal: the sums run over j <= i (+ Lk - Lq); with decay g: S_t = g_t S_(t-1) + phi(k_t) v_t^T, z likewise
//
//   attn::linear(q, k, v, out);                                 // Eigen matrices [length, dim]: one head
//   attn::linear(q, k, v, out, {.causal = true}, threads);
//   attn::linear(q, k, v, out, {}, attn::relu{});               // another feature map: see feature_maps.hpp
//   attn::linear(q, k, v, out, {.causal = true, .decay = g}, [](float x) { return x * x; });
//
// Shapes   q [B, H, Lq, D], k [B, Hkv, Lk, D], v [B, Hkv, Lk, Dv], out [B, H, Lq, Dv]; Hkv divides H. float, double, or
//          Eigen::half / Eigen::bfloat16 in memory with float arithmetic. No scale: put it into q and k.
// Cost     2 B (H + Hkv) L D Dv operations, O(L); causal B H L 64 (D + Dv) more. Scratch: a few times (D + 64)(Dv + 64)
//          numbers a thread, whatever the length.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
//
// A denominator of 0 (or less than 16 times the smallest normal number) gives zeros. Token by token: linear_state.hpp.
#pragma once

#include <attn/kernel/detail/engine.hpp>
#include <attn/kernel/feature_maps.hpp>
#include <attn/kernel/detail/options.hpp>

namespace attn::inline ATTN_ISA {

/// Options of linear for elements of type S.
template <class S>
struct linear_options {
  static_assert(element<S>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");
  using real = compute_type<S>;

  /// Query i stands at i + Lk - Lq (true lengths) and sees the keys up to there.
  bool causal = false;
  /// True lengths, one per batch item: for queries and keys alike, or apart. Rows of padding are 0 in out.
  list_view<index> lengths{}, query_lengths{}, key_lengths{};
  /// Added to the denominator.
  real eps = real(1e-6);
  /// Divide by phi(q).z + eps at all?
  bool normalise = true;
  /// Factor of what came before, per token, from 0 to 1: [B, H or Hkv, Lk]; causal only.
  tensor_view<const real, 3> decay{};
};

namespace detail {

template <class F, class T>
constexpr void require_feature_map() {
  static_assert(number_map<F, T> || token_map<F, T>,
                "attn: a feature map must be callable as map(x) and return a "
                "number, or have features(dim) and be "
                "callable as map(token, phi) on spans");
}

template <class S, class F>
mapped_features<S, F> make_mapped_features(const validator& check, const F& map, const attention_shape& shape) {
  mapped_features<S, F> made(map, shape.dim);
  check_feature_count(check, made.count, shape);
  return made;
}

/// Everything linear refuses, it refuses here.
template <class S>
std::pair<attention_shape, sequence_lengths> check_linear(const validator& check, const tensor_view<const S>& q,
                                                          const tensor_view<const S>& k, const tensor_view<const S>& v,
                                                          const tensor_view<S>& out, const linear_options<S>& options) {
  const attention_shape shape = check_attention(check, q, k, v, out);
  const sequence_lengths lengths = check_lengths(check, shape, options);
  check_eps(check, options.eps);
  if (options.decay) {
    if (!options.causal) check.fail("causal with decay", "no causal");
    check.no_alias("out", out, "decay", options.decay);
    check_gates(check, "decay", options.decay, shape, lengths);
  }
  return {shape, lengths};
}

}  // namespace detail

/// Linear attention with a feature map, by an execution; either may be left out. See the top of the file.
template <viewable Q, viewable K, viewable V, viewable O, class F>
  requires(!std::same_as<std::remove_cvref_t<F>, execution>)
void linear(const Q& q, const K& k, const V& v, O&& out, const linear_options<element_of<const Q&>>& options,
            const F& map, execution& exec) {
  detail::require_one_element_type<const Q&, const K&, const V&, O>();
  using S = element_of<const Q&>;
  using T = compute_type<S>;
  detail::require_feature_map<F, T>();
  const detail::validator check("linear");
  const tensor_view<const S> queries = as_view(q), keys = as_view(k), values = as_view(v);
  const tensor_view<S> to = as_view(out);
  const auto [shape, lengths] = detail::check_linear(check, queries, keys, values, to, options);
  auto features = detail::make_mapped_features<S>(check, map, shape);
  const index heads = detail::heads_of_sums(shape, {options.decay ? options.decay.extent(1) : 0});
  detail::kernel_call<S>{
      queries,           keys,        values,        to,   shape, lengths, features, heads, options.causal,
      options.normalise, options.eps, options.decay, false}
      .run(exec);
}

template <viewable Q, viewable K, viewable V, viewable O, class F>
  requires(!std::same_as<std::remove_cvref_t<F>, execution>)
void linear(const Q& q, const K& k, const V& v, O&& out, const linear_options<element_of<const Q&>>& options,
            const F& map) {
  execution serial;
  linear(q, k, v, out, options, map, serial);
}

template <viewable Q, viewable K, viewable V, viewable O>
void linear(const Q& q, const K& k, const V& v, O&& out, const linear_options<element_of<const Q&>>& options,
            execution& exec) {
  linear(q, k, v, out, options, elu_plus_one{}, exec);
}

template <viewable Q, viewable K, viewable V, viewable O>
void linear(const Q& q, const K& k, const V& v, O&& out, const linear_options<element_of<const Q&>>& options = {}) {
  execution serial;
  linear(q, k, v, out, options, elu_plus_one{}, serial);
}

}  // namespace attn
