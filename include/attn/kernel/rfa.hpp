// attn: random feature attention.
//
//   out_i = phi(q_i)^T S / (phi(q_i)^T z + eps),  phi(x) = [sin W x^, cos W x^],  x^ = x / (|x| + norm_eps)
//                                                   Peng et al. 2021, "Random feature attention"
//   S = sum_j phi(k_j) v_j^T, z = sum_j phi(k_j); with a gate g: S_t = g_t S_(t-1) + (1 - g_t) phi(k_t) v_t^T,
//   z likewise
//
//   auto features = attn::draw_features<float>(256, 64, {.seed = 7});    // the temperature is a factor of theirs
//   attn::rfa(q, k, v, out, features, {.causal = true, .gate = g});
//
// Shapes   q [B, H, Lq, D], k [B, Hkv, Lk, D], v [B, Hkv, Lk, Dv], out [B, H, Lq, Dv], features
//          [H, Hkv or 1, m, D]; Hkv divides H. float, double, or Eigen::half / Eigen::bfloat16 in memory with float
//          arithmetic and features.
// Cost     2 B L m (D + 2 Dv) (H + Hkv) operations, O(L); causal B H L 64 (2m + Dv) more. Scratch: at most
//          about 32 m (Dv + 32) numbers a thread, whatever the length; that is where threads share a head.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
//
// Weights may be negative, and a denominator near 0 makes a row large: that is the method's, not rounding. A token of
// zeros with norm_eps 0 stays zeros. One whose squares overflow (norm 1.8e19 in float) counts as zeros. Token by token:
// rfa_state.hpp.
#pragma once

#include <attn/core/detail/sin_cos.hpp>
#include <attn/kernel/detail/engine.hpp>
#include <attn/kernel/detail/options.hpp>
#include <attn/kernel/detail/projection.hpp>
#include <attn/kernel/draw_features.hpp>

namespace attn::inline ATTN_ISA {

/// Options of rfa for elements of type S.
template <class S>
struct rfa_options {
  static_assert(element<S>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");
  using real = compute_type<S>;

  /// Query i stands at i + Lk - Lq (true lengths) and sees the keys up to there.
  bool causal = false;
  /// True lengths, one per batch item: for queries and keys alike, or apart. Rows of padding are 0 in out.
  list_view<index> lengths{}, query_lengths{}, key_lengths{};
  /// Added to the denominator.
  real eps = real(0);
  /// Added to the norm of a token before dividing by it; the original uses 0.001.
  real norm_eps = real(0);
  /// Per token, from 0 to 1: [B, H or Hkv, Lk]; causal only.
  tensor_view<const real, 3> gate{};
};

namespace detail {

template <class S>
struct rfa_features final : kernel_features<S> {
  using T = compute_type<S>;

  tensor_view<const T, 3> w;
  T norm_eps;
  index heads;  // of sums
  packed_projection<T> packed{};

  rfa_features(const tensor_view<const T, 3>& features, T eps, index sum_heads)
      : w(features), norm_eps(eps), heads(sum_heads) {}

  bool shared() const override { return w.extent(0) == 1; }
  index features() const override { return 2 * w.extent(1); }
  index work() const override { return (w.extent(2) + 1) * kernel_chunk; }
  void layout(arena& memory, index) override { packed = packed_projection<T>::layout(memory, w); }
  void prepare(execution&) override { packed.pack(w, T(1)); }

  void keys(const token_rows<S>& x, index pair, T* phi, T*, T* work) const override {
    const index m = w.extent(1), dim = w.extent(2);
    T *const columns = work, *const factor = work + dim * kernel_chunk;
    pack_columns(x, x.count, dim, x.col_stride, columns);
    sum_squares(columns, dim, kernel_chunk, factor);
    for (index t = 0; t < kernel_chunk; ++t) {
      const T norm = std::sqrt(factor[t]) + norm_eps;
      factor[t] = norm == T(0) ? T(0) : T(1) / norm;
    }
    packed.apply(pair % heads / (heads / w.extent(0)), columns, x.lanes, phi);
    for (index r = 0; r < m; ++r)
      for (index t = 0; t < x.lanes; t += width<T>) {
        T* const at = phi + r * kernel_chunk + t;
        packet<T> sine, cosine;
        sin_cos<T>(mul(load<T>(at), load<T>(factor + t)), sine, cosine);
        store<T>(at, sine), store<T>(at + m * kernel_chunk, cosine);
      }
  }
};

/// Everything rfa refuses, it refuses here.
template <class S>
std::pair<attention_shape, sequence_lengths> check_rfa(const validator& check, const tensor_view<const S>& q,
                                                       const tensor_view<const S>& k, const tensor_view<const S>& v,
                                                       const tensor_view<S>& out,
                                                       const tensor_view<const compute_type<S>, 3>& features,
                                                       const rfa_options<S>& options) {
  const attention_shape shape = check_attention(check, q, k, v, out);
  const sequence_lengths lengths = check_lengths(check, shape, options);
  check_features(check, features, shape, out);
  check_eps(check, options.eps);
  check_eps(check, options.norm_eps, "norm_eps");
  if (options.gate) {
    if (!options.causal) check.fail("causal with a gate", "no causal");
    check.no_alias("out", out, "gate", options.gate);
    check_gates(check, "gate", options.gate, shape, lengths);
  }
  return {shape, lengths};
}

}  // namespace detail

/// Random feature attention; the execution may be left out. See the top of the file.
template <viewable Q, viewable K, viewable V, viewable O>
void rfa(const Q& q, const K& k, const V& v, O&& out,
         const std::type_identity_t<tensor_view<const compute_type<element_of<const Q&>>, 3>>& features,
         const rfa_options<element_of<const Q&>>& options, execution& exec) {
  detail::require_one_element_type<const Q&, const K&, const V&, O>();
  using S = element_of<const Q&>;
  const tensor_view<const S> queries = as_view(q), keys = as_view(k), values = as_view(v);
  const tensor_view<S> to = as_view(out);
  const auto [shape, lengths] = detail::check_rfa(detail::validator("rfa"), queries, keys, values, to, features, options);
  const index heads = detail::heads_of_sums(shape, {features.extent(0), options.gate ? options.gate.extent(1) : 0});
  detail::rfa_features<S> map(features, options.norm_eps, heads);
  detail::kernel_call<S>{queries, keys,           values, to,          shape,        lengths, map,
                         heads,   options.causal, true,   options.eps, options.gate, true}
      .run(exec);
}

template <viewable Q, viewable K, viewable V, viewable O>
void rfa(const Q& q, const K& k, const V& v, O&& out,
         const std::type_identity_t<tensor_view<const compute_type<element_of<const Q&>>, 3>>& features,
         const rfa_options<element_of<const Q&>>& options = {}) {
  execution serial;
  rfa(q, k, v, out, features, options, serial);
}

}  // namespace attn
