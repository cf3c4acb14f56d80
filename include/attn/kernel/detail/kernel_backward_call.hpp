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

/// What a backward call is asked for: what the gradients of each operator convert to.
template <class S>
struct kernel_gradients {
  using T = compute_type<S>;

  tensor_view<S> q{}, k{}, v{}, a{}, b{};
  tensor_view<S, 3> features{};
  tensor_view<T, 3> gate{}, beta{};
  tensor_view<T> log_decay{};
  tensor_view<T, 2> bonus{};
  tensor_view<T> initial_state{};
  tensor_view<T, 3> initial_weights{};
  tensor_view<const T> d_final_state{};
  tensor_view<const T, 3> d_final_weights{};
  bool accumulate = false;
};

/// A backward call whose views are named, once for all operators of the family. The final state is not written again.
template <class S, class Options, class T = compute_type<S>>
kernel_backward_call<T> name_gradients(call_views& check, const kernel_views<S>& x, const kernel_gradients<S>& g,
                                       const Options& given) {
  kernel_backward_call<T> one{
      .forward = {given, x.q, x.k, x.v, x.out}, .d_out = x.d_out, .accumulate = g.accumulate};
  name_inputs(check, x, one.forward);
  recurrence_parameters<T>& o = one.forward.recurrence;
  o.final_state = {}, o.final_weights = {};
  const auto tokens = [&](const char* name, const tensor_view<S>& gradient, const tensor_view<const S>& of) {
    check.gradient(name, gradient, of);
    return stored_gradient<T>(gradient, g.accumulate);
  };
  const auto numbers = [&](const char* name, const auto& gradient, const auto& of) {
    check.gradient(name, gradient, of);
    return gradient;
  };
  check.option("d_final_state", one.d_final_state = g.d_final_state);
  check.option("d_final_weights", one.d_final_weights = g.d_final_weights);
  one.dq = tokens("q", g.q, x.q), one.dk = tokens("k", g.k, x.k), one.dv = tokens("v", g.v, x.v);
  one.da = tokens("a", g.a, x.a), one.db = tokens("b", g.b, x.b);
  check.gradient("features", g.features, x.features);
  if (g.features) one.d_features = {in_one_item(g.features), g.accumulate};
  one.d_gate = numbers(one.forward.gate_name(), g.gate, one.forward.gate);
  one.d_beta = numbers("beta", g.beta, o.beta);
  one.d_log_decay = numbers("log_decay", g.log_decay, o.log_decay);
  one.d_bonus = numbers("bonus", g.bonus, o.bonus);
  one.d_initial_state = numbers("initial_state", g.initial_state, o.initial_state);
  one.d_initial_weights = numbers("initial_weights", g.initial_weights, o.initial_weights);
  return one;
}

/// A checked backward call of an operator of feature sums, but for what it has of its own.
template <class S, class Options>
auto check_kernel_backward(call_views& check, const kernel_views<S>& x,
                           const std::type_identity_t<kernel_gradients<S>>& g, const Options& given) {
  auto one = name_gradients(check, x, g, given);
  memory_layout out = x.q;  // of the shape out has
  out.extents[3] = x.v.extent(3);
  const attention_shape s = check_attention_extents(check, x.q, x.k, x.v, out);
  check.extents({{"d_out batch = query batch", s.batch, x.d_out.extent(0)},
                 {"d_out heads = query heads", s.heads, x.d_out.extent(1)},
                 {"d_out length = query length", s.queries, x.d_out.extent(2)},
                 {"d_out dim = value dim", s.dim_v, x.d_out.extent(3)}});
  check_parameters(check, one.forward, s, x, 0);
  return one;
}

}}}  // namespace attn::ATTN_ISA::detail
