// attn: random feature attention token by token.
//
//   attn::rfa_state<float> state(heads, 256, 64);                         // heads, features, value dim
//   attn::rfa_step(state, q_t, k_t, v_t, out_t, features);                // what causal rfa gives
//
// Copies, merging, writing and reading: see kernel_state.hpp.
#pragma once

#include <attn/kernel/linear_step.hpp>
#include <attn/kernel/rfa.hpp>

namespace attn::inline ATTN_ISA {

/// The sums of rfa for elements of type S and `features` rows of W. `heads` are the key heads, or, where every query
/// head has features or a gate of its own, the query heads. Throws std::invalid_argument for negative extents or sizes
/// no memory can hold.
template <element S>
class rfa_state : public kernel_state<compute_type<S>> {
 public:
  rfa_state(index batch, index heads, index features, index value_dim)
      : kernel_state<compute_type<S>>("rfa_state", {3, 0, false}, batch, heads,
                                      features < std::numeric_limits<index>::max() / 2 ? 2 * features : features,
                                      value_dim) {}
  rfa_state(index heads, index features, index value_dim) : rfa_state(1, heads, features, value_dim) {}
};

/// Options of rfa_step: those of rfa that make sense for tokens as they come.
template <class S>
struct rfa_step_options {
  static_assert(element<S>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");
  using real = compute_type<S>;

  real eps = real(0), norm_eps = real(0);
  /// [B, H or Hkv, n]
  tensor_view<const real, 3> gate{};
};

/// Feeds n tokens, k [B, Hkv, n, D] and v [B, Hkv, n, Dv], and answers their queries q [B, H, n, D] causally: the next
/// n rows of one causal rfa over the whole stream, always with the same features. Throws std::invalid_argument before
/// anything, the state included, changes. Should anything else be thrown, for want of memory, the state is reset.
template <element S, viewable Q, viewable K, viewable V, viewable O>
void rfa_step(rfa_state<S>& state, const Q& q, const K& k, const V& v, O&& out,
              const std::type_identity_t<tensor_view<const compute_type<S>, 3>>& features,
              const std::type_identity_t<rfa_step_options<S>>& options, execution& exec) {
  detail::require_one_element_type<const Q&, const K&, const V&, O>();
  static_assert(std::same_as<S, element_of<const Q&>>, "attn: the state and q must have one element type");
  const detail::validator check("rfa_step");
  const tensor_view<const S> queries = as_view(q), keys = as_view(k), values = as_view(v);
  const tensor_view<S> to = as_view(out);
  rfa_options<S> causal;
  causal.causal = true, causal.eps = options.eps, causal.norm_eps = options.norm_eps, causal.gate = options.gate;
  const auto [shape, lengths] = detail::check_rfa(check, queries, keys, values, to, features, causal);
  const index heads = detail::heads_of_sums(shape, {features.extent(0), options.gate ? options.gate.extent(1) : 0});
  detail::rfa_features<S> map(features, options.norm_eps, state.heads());
  detail::check_state(check, state, shape, heads, map.features(), queries, keys, values, to);
  check.no_alias("the state", state.memory(), "features", features);
  check.no_alias("the state", state.memory(), "gate", options.gate);
  const detail::kernel_call<S> call{queries,       keys, values, to,          shape,        lengths, map,
                                    state.heads(), true, true,   options.eps, options.gate, true,    &state};
  detail::run_step(call, exec);
}

template <element S, viewable Q, viewable K, viewable V, viewable O>
void rfa_step(rfa_state<S>& state, const Q& q, const K& k, const V& v, O&& out,
              const std::type_identity_t<tensor_view<const compute_type<S>, 3>>& features,
              const std::type_identity_t<rfa_step_options<S>>& options = {}) {
  execution serial;
  rfa_step(state, q, k, v, out, features, options, serial);
}

}  // namespace attn
