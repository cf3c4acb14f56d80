// attn: a backward call of kernel attention: its views, and what it is after its checks.
#pragma once

#include <attn/kernel/detail/kernel_checks.hpp>
#include <attn/kernel/detail/stored_rows.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <class T>
struct feature_map_backward;

/// `call` is the forward call without out. Gradients that are not wanted are null.
template <class T>
struct kernel_backward_call {
  kernel_call<T>& call;
  feature_map_backward<T>* map = nullptr;  // null by the rules that read the state
  stored_tensor<T> d_out{};
  stored_gradient<T> dq{}, dk{}, dv{}, da{}, db{};
  tensor_view<const T> d_final_state{};
  tensor_view<const T, 3> d_final_weights{};
  tensor_view<T, 3> d_gate{}, d_beta{};  // d_gate: of decays or gates per token
  tensor_view<T> d_log_decay{};
  tensor_view<T, 2> d_bonus{};
  tensor_view<T> d_initial_state{};
  tensor_view<T, 3> d_initial_weights{};
  bool d_features = false;  // gradients of the features of performer and rfa
  bool accumulate = false;

  const recurrence_parameters<T>& parameters() const { return call.recurrence; }
  idx_t features() const { return call.features(); }
  idx_t dim_v() const { return call.shape.dim_v; }
  /// Which head of a parameter or of its gradient belongs to head h of the states, and whether earlier ones add to it.
  template <class View>
  idx_t at(const View& x, idx_t h) const { return call.parameter_head(x.extent(1), h); }
  template <class View>
  bool adds(const View& x, idx_t h) const { return accumulate || h % (call.heads / x.extent(1)) != 0; }
  /// Whether there is a column of ones.
  bool weights() const { return call.normalise || d_final_weights; }
  idx_t columns() const { return dim_v() + (weights() ? 1 : 0); }
  bool of_decays() const { return d_gate || d_log_decay; }
  bool of_queries() const { return dq || d_features || d_bonus || of_decays(); }
  bool of_keys() const { return dk || da || db || d_features || of_decays(); }
  /// Whether any wanted gradient depends on later tokens.
  bool reverse() const { return of_keys() || dv || d_beta || d_initial_state || d_initial_weights; }
  bool any() const { return of_queries() || reverse(); }
};

/// Names the gradients that a backward call reads and writes, once for all operators of the family.
template <class S, class Gradients, class Options>
void name_gradients(call_views& check, const kernel_views<S>& x, const Gradients& g, const Options& o) {
  if constexpr (requires { g.d_final_state; }) check.option("d_final_state", g.d_final_state);
  if constexpr (requires { g.d_final_weights; }) check.option("d_final_weights", g.d_final_weights);
  check.gradient("q", g.q, x.q), check.gradient("k", g.k, x.k), check.gradient("v", g.v, x.v);
  if constexpr (requires { g.a; }) check.gradient("a", g.a, x.a), check.gradient("b", g.b, x.b);
  if constexpr (requires { g.features; }) check.gradient("features", g.features, x.features);
  if constexpr (requires { g.decay; }) check.gradient("decay", g.decay, o.decay);
  if constexpr (requires { g.gate; }) check.gradient("gate", g.gate, o.gate);
  if constexpr (requires { g.beta; }) check.gradient("beta", g.beta, o.beta);
  if constexpr (requires { g.log_decay; }) check.gradient("log_decay", g.log_decay, o.log_decay);
  if constexpr (requires { g.bonus; }) check.gradient("bonus", g.bonus, o.bonus);
  if constexpr (requires { g.initial_state; }) check.gradient("initial_state", g.initial_state, o.initial_state);
  if constexpr (requires { g.initial_weights; })
    check.gradient("initial_weights", g.initial_weights, o.initial_weights);
}

/// A checked backward call with the gradients g.
template <class S, class Gradients, class T = compute_type<S>>
kernel_backward_call<T> backward_call_of(kernel_call<T>& call, const kernel_views<S>& x, const Gradients& g,
                                         feature_map_backward<T>* map = nullptr) {
  kernel_backward_call<T> one{.call = call, .map = map, .d_out = x.d_out, .dq = {g.q, g.accumulate},
                              .dk = {g.k, g.accumulate}, .dv = {g.v, g.accumulate}, .accumulate = g.accumulate};
  if constexpr (requires { g.a; }) one.da = {g.a, g.accumulate}, one.db = {g.b, g.accumulate};
  if constexpr (requires { g.features; }) one.d_features = bool(g.features);
  if constexpr (requires { g.decay; }) one.d_gate = g.decay;
  if constexpr (requires { g.gate; }) one.d_gate = g.gate;
  if constexpr (requires { g.beta; }) one.d_beta = g.beta;
  if constexpr (requires { g.bonus; }) one.d_bonus = g.bonus;
  if constexpr (requires { g.initial_state; })
    one.d_log_decay = g.log_decay, one.d_initial_state = g.initial_state, one.d_final_state = g.d_final_state;
  if constexpr (requires { g.initial_weights; })
    one.d_initial_weights = g.initial_weights, one.d_final_weights = g.d_final_weights;
  return one;
}

}}}  // namespace attn::ATTN_ISA::detail
