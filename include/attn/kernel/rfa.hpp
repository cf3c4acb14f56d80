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
//          arithmetic.
// Cost     2 B L m (D + 2 Dv) (H + Hkv) operations, O(L); causal B H L 64 (2m + Dv) more. Scratch: at most
//          about 32 m (Dv + 32) numbers per thread, whatever the length; that is where threads share a head.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
//
// Weights may be negative, and a denominator near 0 makes a row large: that is the method's, not rounding. A token of
// zeros with norm_eps 0 stays zeros. One whose squares overflow (norm 1.8e19 in float) counts as zeros. Token by token:
// rfa_step.hpp.
#pragma once

#include <attn/core/detail/sin_cos.hpp>
#include <attn/kernel/detail/engine.hpp>
#include <attn/kernel/detail/projection.hpp>
#include <attn/kernel/draw_features.hpp>

namespace attn::inline ATTN_ISA {

/// Options of rfa for elements of type S.
template <class S>
struct rfa_options {
  static_assert(element<S>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");
  using real = compute_type<S>;

  /// Query i is at position i + Lk - Lq (true lengths) and sees the keys up to there.
  bool causal = false;
  /// True lengths, one per batch item: for queries and keys alike, or separately. Rows of padding are 0 in out.
  list_view<index> lengths{}, query_lengths{}, key_lengths{};
  /// Added to the denominator.
  real eps = real(0);
  /// Added to the norm of a token before dividing by it; the original uses 0.001.
  real norm_eps = real(0);
  /// Per token, from 0 to 1: [B, H or Hkv, Lk]; causal only.
  tensor_view<const real, 3> gate{};
};

namespace detail {

template <class T>
struct rfa_features final : feature_map<T> {
  stored_tensor<T> w;  // [1, heads, features, dim]
  const element_access<T>* access;
  T norm_eps;
  index heads;  // of sums
  packed_projection<T> packed{};

  rfa_features(const stored_tensor<T>& projection, T eps, index sum_heads)
      : w(projection), access(projection.access), norm_eps(eps), heads(sum_heads) {
    this->features = 2 * w.extents[2];
    this->scratch_size = (w.extents[3] + 1) * kernel_chunk;
    this->operations = 2 * w.extents[2] * w.extents[3] + 20 * w.extents[2];
    this->shared = w.extents[1] == 1;
  }

  void layout(arena& memory, index) override { packed = packed_projection<T>::layout(memory, w); }
  void prepare(execution&) override { packed.pack(w, T(1)); }

  void keys(const token_rows<T>& x, index pair, T* phi, T*, T* work) const override {
    const index m = w.extents[2], dim = w.extents[3];
    T *const columns = work, *const factor = work + dim * kernel_chunk;
    access->pack_columns(x, dim, columns);
    sum_squares(columns, dim, x.lanes, factor);
    for (index t = 0; t < x.lanes; ++t) {
      const T norm = std::sqrt(factor[t]) + norm_eps;
      factor[t] = norm == T(0) ? T(0) : T(1) / norm;
    }
    packed.apply(pair % heads / (heads / w.extents[1]), columns, x.lanes, phi);
    for (index r = 0; r < m; ++r)
      for (index t = 0; t < x.lanes; t += width<T>) {
        T* const at = phi + r * kernel_chunk + t;
        packet<T> sine, cosine;
        sin_cos<T>(mul(load<T>(at), load<T>(factor + t)), sine, cosine);
        store<T>(at, sine), store<T>(at + m * kernel_chunk, cosine);
      }
  }
};

/// Everything rfa refuses, it refuses here; `state` where it is a step.
template <class S, class State>
std::pair<attention_shape, sequence_lengths> check_rfa(const validator& check, const kernel_views<S>& x,
                                                       const tensor_view<const S, 3>& features,
                                                       const rfa_options<S>& options, const State* state) {
  const attention_shape shape = check_attention(check, x.q, x.k, x.v, x.out);
  const sequence_lengths lengths = check_lengths(check, shape, options);
  check_features(check, features, shape_of_parameters(shape, state), x.out);
  check_eps(check, options.eps);
  check_eps(check, options.norm_eps, "norm_eps");
  if (options.gate) {
    if (!options.causal) check.fail("causal with a gate", "no causal");
    check.no_alias("out", x.out, "gate", options.gate);
    check_gates(check, "gate", options.gate, shape_of_parameters(shape, state), lengths);
  }
  return {shape, lengths};
}

/// The whole call, or, with a state, a step.
template <class S, class State = no_state>
void run_rfa(const validator& check, const kernel_views<S>& x, const tensor_view<const S, 3>& w,
             const rfa_options<S>& options, execution& exec, State* state = nullptr) {
  using T = compute_type<S>;
  const auto [shape, lengths] = check_rfa(check, x, w, options, state);
  const index heads =
      heads_of_sums(shape_of_parameters(shape, state), {w.extent(0), options.gate ? options.gate.extent(1) : 0});
  rfa_features<T> map(stored_features(w), options.norm_eps, state ? state->heads() : heads);
  run_kernel(check,
             kernel_call<T>{.q = x.q,
                            .k = x.k,
                            .v = x.v,
                            .out = x.out,
                            .shape = shape,
                            .lengths = lengths,
                            .map = map,
                            .heads = heads,
                            .causal = options.causal,
                            .eps = options.eps,
                            .gate = options.gate,
                            .complement = true},
             state, {{"q", x.q}, {"k", x.k}, {"v", x.v}, {"out", x.out}, {"features", w}, {"gate", options.gate}},
             exec);
}

}  // namespace detail

/// Random feature attention; options and execution may each be left out. See the top of the file.
template <viewable Q, viewable K, viewable V, viewable O, class Features = rfa_options<element_of<const Q&>>,
          class Options = rfa_options<element_of<const Q&>>>
void rfa(const Q& q, const K& k, const V& v, O&& out, const Features& features = {}, Options&& options = {},
         execution_ref exec = {}) {
  detail::require_one_element_type<const Q&, const K&, const V&, O>();
  using S = element_of<const Q&>;
  detail::run_rfa<S>(detail::validator("rfa"), {as_view(q), as_view(k), as_view(v), as_view(out)},
                     detail::view_of_features<S>(features), detail::options_or_default<rfa_options<S>>(options),
                     detail::execution_of(exec, options));
}

}  // namespace attn::inline ATTN_ISA
