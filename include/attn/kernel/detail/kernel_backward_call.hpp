// attn: a backward call of kernel attention, and the checks that all operators of the family share.
#pragma once

#include <attn/core/detail/gradients.hpp>
#include <attn/kernel/detail/kernel_checks.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <class T>
struct feature_map_backward;

/// `forward` is the forward call without out. Gradients that are not wanted are null.
template <class T>
struct kernel_backward_call {
  kernel_call<T> forward{};
  feature_map_backward<T>* map = nullptr;  // null by the rules that read the state
  stored_tensor<T> d_out{};
  stored_gradient<T> dq{}, dk{}, dv{}, da{}, db{};
  stored_gradient<T> d_features{};  // as call.projection, of performer and rfa
  tensor_view<const T> d_final_state{};
  tensor_view<const T, 3> d_final_weights{};
  tensor_view<T, 3> d_gate{}, d_beta{};  // d_gate: of decays or gates per token
  tensor_view<T> d_log_decay{};
  tensor_view<T, 2> d_bonus{};
  tensor_view<T> d_initial_state{};
  tensor_view<T, 3> d_initial_weights{};
  bool accumulate = false;

  const recurrence_parameters<T>& parameters() const { return forward.recurrence; }
  idx_t features() const { return forward.features(); }
  idx_t dim_v() const { return forward.shape.dim_v; }
  /// Which head of a parameter or of its gradient belongs to head h of the states, and whether earlier ones add to it.
  template <class View>
  idx_t at(const View& x, idx_t h) const { return forward.parameter_head(x.extent(1), h); }
  template <class View>
  bool adds(const View& x, idx_t h) const { return accumulate || h % (forward.heads / x.extent(1)) != 0; }
  /// Whether there is a column of ones.
  bool weights() const { return forward.normalise || d_final_weights; }
  idx_t columns() const { return dim_v() + (weights() ? 1 : 0); }
  bool of_decays() const { return d_gate || d_log_decay; }
  bool of_queries() const { return dq || d_features || d_bonus || of_decays(); }
  bool of_keys() const { return dk || da || db || d_features || of_decays(); }
  /// Whether any wanted gradient depends on later tokens.
  bool reverse() const { return of_keys() || dv || d_beta || d_initial_state || d_initial_weights; }
  bool any() const { return of_queries() || reverse(); }
};

/// Names the views of a backward call and takes what it is asked for, once for all operators of the family.
template <class S, class Gradients, class Options, class T = compute_type<S>>
kernel_backward_call<T> name_gradients(call_views& check, const kernel_views<S>& x, const Gradients& g,
                                       const Options& o) {
  kernel_backward_call<T> one{.forward = name_inputs(check, x, o), .d_out = x.d_out, .accumulate = g.accumulate};
  const auto tokens = [&](const char* name, const auto& gradient, const auto& of, stored_gradient<T>& to) {
    check.gradient(name, gradient, of);
    to = {gradient, g.accumulate};
  };
  const auto numbers = [&](const char* name, const auto& gradient, const auto& of, auto& to) {
    check.gradient(name, to = gradient, of);
  };
  if constexpr (requires { g.d_final_state; }) check.option("d_final_state", one.d_final_state = g.d_final_state);
  if constexpr (requires { g.d_final_weights; })
    check.option("d_final_weights", one.d_final_weights = g.d_final_weights);
  tokens("q", g.q, x.q, one.dq), tokens("k", g.k, x.k, one.dk), tokens("v", g.v, x.v, one.dv);
  if constexpr (requires { g.a; }) tokens("a", g.a, x.a, one.da), tokens("b", g.b, x.b, one.db);
  if constexpr (requires { g.features; }) {
    check.gradient("features", g.features, x.features);
    if (g.features) one.d_features = {in_one_item(tensor_view<S, 3>(g.features)), g.accumulate};
  }
  if constexpr (requires { g.decay; }) numbers("decay", g.decay, o.decay, one.d_gate);
  if constexpr (requires { g.gate; }) numbers("gate", g.gate, o.gate, one.d_gate);
  if constexpr (requires { g.beta; }) numbers("beta", g.beta, o.beta, one.d_beta);
  if constexpr (requires { g.log_decay; }) numbers("log_decay", g.log_decay, o.log_decay, one.d_log_decay);
  if constexpr (requires { g.bonus; }) numbers("bonus", g.bonus, o.bonus, one.d_bonus);
  if constexpr (requires { g.initial_state; })
    numbers("initial_state", g.initial_state, o.initial_state, one.d_initial_state);
  if constexpr (requires { g.initial_weights; })
    numbers("initial_weights", g.initial_weights, o.initial_weights, one.d_initial_weights);
  return one;
}

/// A checked backward call of an operator of feature sums, but for what it has of its own.
template <class S, class Gradients, class Options>
auto check_kernel_backward(call_views& check, const kernel_views<S>& x, const Gradients& g, const Options& options) {
  auto one = name_gradients(check, x, g, options);
  memory_layout out = x.q;  // of the shape out has
  out.extents[3] = x.v.extent(3);
  const attention_shape s = check_attention_extents(check, x.q, x.k, x.v, out);
  check.extents({{"d_out batch = query batch", s.batch, x.d_out.extent(0)},
                 {"d_out heads = query heads", s.heads, x.d_out.extent(1)},
                 {"d_out length = query length", s.queries, x.d_out.extent(2)},
                 {"d_out dim = value dim", s.dim_v, x.d_out.extent(3)}});
  check_parameters(check, one.forward, s, x, options, 0);
  return one;
}

}}}  // namespace attn::ATTN_ISA::detail
