// attn: linear attention token by token.
//
//   attn::linear_state<float> state(heads, 64, 64);            // a million tokens in constant memory
//   attn::linear_step(state, q_t, k_t, v_t, out_t);            // what causal linear gives; one token or many
//
// A copy is a branch of the sequence; states of parts merge: see kernel_state.hpp, also for writing and reading them. A
// step with queries and out of 0 heads only takes in.
#pragma once

#include <attn/kernel/linear.hpp>

namespace attn::inline ATTN_ISA {

/// The sums of linear attention for elements of type S. `features` is what the map makes of a key: its dim, unless the
/// caller's own map says otherwise. `heads` are the key heads, or, where every query head has a decay of its own, the
/// query heads. Throws std::invalid_argument for negative extents or sizes no memory can hold.
template <element S>
class linear_state : public kernel_state<compute_type<S>> {
 public:
  linear_state(index batch, index heads, index features, index value_dim)
      : kernel_state<compute_type<S>>("linear_state", {1, 0, false}, batch, heads, features, value_dim) {}
  linear_state(index heads, index features, index value_dim) : linear_state(1, heads, features, value_dim) {}
};

namespace detail {

/// What a step checks of a state.
template <class T, class S>
void check_state(const validator& check, const kernel_state<T>& state, const attention_shape& s, index heads, index features,
                 const tensor_view<const S>& q, const tensor_view<const S>& k, const tensor_view<const S>& v,
                 const tensor_view<S>& out) {
  check.equal("query length = key length", s.keys, s.queries);
  check.equal("query batch = batch of the state", state.batch(), s.batch);
  if (state.heads() != heads && !(state.heads() == s.heads && heads == s.kv_heads))
    check.fail(text({"a state of heads ", heads}), state.heads());
  check.equal("features of keys = features of the state", state.features(), features);
  check.equal("value dim = value dim of the state", state.value_dim(), s.dim_v);
  check.no_alias("the state", state.memory(), "q", q);
  check.no_alias("the state", state.memory(), "k", k);
  check.no_alias("the state", state.memory(), "v", v);
  check.no_alias("the state", state.memory(), "out", out);
}

/// Runs a step. What is thrown on the way, by a caller's map or for want of memory, leaves the state reset.
template <class S>
void run_step(const kernel_call<S>& call, execution& exec) {
  try {
    call.run(exec);
  } catch (...) {
    call.state->reset();
    throw;
  }
  call.state->advance(call.shape.keys);
}

}  // namespace detail

/// Options of linear_step: those of linear that make sense for tokens as they come.
template <class S>
struct linear_step_options {
  static_assert(element<S>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");
  using real = compute_type<S>;

  real eps = real(1e-6);
  bool normalise = true;
  /// [B, H or Hkv, n]
  tensor_view<const real, 3> decay{};
};

/// Feeds n tokens, k [B, Hkv, n, D] and v [B, Hkv, n, Dv], and answers their queries q [B, H, n, D] causally: the next
/// n rows of one causal linear over the whole stream. One to three tokens are a pass over the state each; more go
/// through chunks. Throws std::invalid_argument before anything, the state included, changes. Should anything else be
/// thrown, by the caller's map or for want of memory, the state is reset.
template <element S, viewable Q, viewable K, viewable V, viewable O, class F>
  requires(!std::same_as<std::remove_cvref_t<F>, execution>)
void linear_step(linear_state<S>& state, const Q& q, const K& k, const V& v, O&& out,
                 const std::type_identity_t<linear_step_options<S>>& options, const F& map, execution& exec) {
  detail::require_one_element_type<const Q&, const K&, const V&, O>();
  static_assert(std::same_as<S, element_of<const Q&>>, "attn: the state and q must have one element type");
  using T = compute_type<S>;
  detail::require_feature_map<F, T>();
  const detail::validator check("linear_step");
  const tensor_view<const S> queries = as_view(q), keys = as_view(k), values = as_view(v);
  const tensor_view<S> to = as_view(out);
  linear_options<S> causal;
  causal.causal = true, causal.eps = options.eps, causal.normalise = options.normalise, causal.decay = options.decay;
  const auto [shape, lengths] = detail::check_linear(check, queries, keys, values, to, causal);
  auto features = detail::make_mapped_features<S>(check, map, shape);
  const index heads = detail::heads_of_sums(shape, {options.decay ? options.decay.extent(1) : 0});
  detail::check_state(check, state, shape, heads, features.features(), queries, keys, values, to);
  check.no_alias("the state", state.memory(), "decay", options.decay);
  const detail::kernel_call<S> call{queries,     keys,          values,        to,    shape,
                                    lengths,     features,      state.heads(), true,  options.normalise,
                                    options.eps, options.decay, false,         &state};
  detail::run_step(call, exec);
}

template <element S, viewable Q, viewable K, viewable V, viewable O, class F>
  requires(!std::same_as<std::remove_cvref_t<F>, execution>)
void linear_step(linear_state<S>& state, const Q& q, const K& k, const V& v, O&& out,
                 const std::type_identity_t<linear_step_options<S>>& options, const F& map) {
  execution serial;
  linear_step(state, q, k, v, out, options, map, serial);
}

template <element S, viewable Q, viewable K, viewable V, viewable O>
void linear_step(linear_state<S>& state, const Q& q, const K& k, const V& v, O&& out,
                 const std::type_identity_t<linear_step_options<S>>& options, execution& exec) {
  linear_step(state, q, k, v, out, options, elu_plus_one{}, exec);
}

template <element S, viewable Q, viewable K, viewable V, viewable O>
void linear_step(linear_state<S>& state, const Q& q, const K& k, const V& v, O&& out,
                 const std::type_identity_t<linear_step_options<S>>& options = {}) {
  execution serial;
  linear_step(state, q, k, v, out, options, elu_plus_one{}, serial);
}

}  // namespace attn
