// attn: a call of kernel attention: its views, and the checks that all operators of the family share.
#pragma once

#include <attn/core/detail/attention_call.hpp>
#include <attn/core/mask_view.hpp>
#include <attn/kernel/detail/kernel_call.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The arguments of a call as views.
template <class S>
struct kernel_views {
  tensor_view<const S> q, k, v;
  tensor_view<S> out{};                // of a forward call
  tensor_view<const S> d_out{};        // of a backward call
  tensor_view<const S, 3> features{};  // of performer and rfa
  tensor_view<const S> a{}, b{};       // of dplr
  bool takes_features = false, queries = true;
};

template <class S, class Q, class K, class V, class O>
kernel_views<S> views_of(const Q& q, const K& k, const V& v, O& out) {
  require_one_element_type<const Q&, const K&, const V&, O&>();
  static_assert(std::same_as<S, element_of<const Q&>>, "attn: the state and q must have one element type");
  return {view_in(q), view_in(k), view_in(v), view_in(out)};
}
/// Tokens to be fed without queries: q has 0 heads.
template <class S, class K, class V>
kernel_views<S> without_queries(const K& k, const V& v) {
  static_assert(std::same_as<S, element_of<const K&>> && std::same_as<S, element_of<const V&>>,
                "attn: the state, k and v must have one element type");
  const tensor_view<const S> keys = as_view(k), values = as_view(v);
  return {.q = tensor_view<const S>(nullptr, {keys.extent(0), 0, keys.extent(2), keys.extent(3)}), .k = keys,
          .v = values, .out = tensor_view<S>(nullptr, {keys.extent(0), 0, keys.extent(2), values.extent(3)}),
          .queries = false};
}
template <class S, class Q, class K, class V, class D>
kernel_views<S> backward_views_of(const Q& q, const K& k, const V& v, const D& d_out) {
  require_one_element_type<const Q&, const K&, const V&, tensor_view<S>>();
  require_one_element_type<const D&, const D&, const D&, tensor_view<S>>();
  return {.q = as_view(q), .k = as_view(k), .v = as_view(v), .d_out = as_view(d_out)};
}
/// The same with the caller's features [H, Hkv or 1, count, dim].
template <class S, class W>
kernel_views<S> with_features(kernel_views<S> x, const W& w) {
  constexpr bool fits = std::convertible_to<const W&, tensor_view<const S, 3>>;
  static_assert(
      fits,
      "attn: performer and rfa take random features after out: a view [heads or 1, features, dim] or an Eigen "
      "matrix [features, dim] of the element type of q, such as attn::draw_features<float>(256, 64)");
  x.takes_features = true;
  if constexpr (fits) x.features = w;
  return x;
}
/// The same with the rows a and b of dplr.
template <class S, class A, class B>
kernel_views<S> with_rows(kernel_views<S> x, const A& a, const B& b) {
  require_one_element_type<const A&, const A&, const B&, tensor_view<S>>();
  static_assert(std::same_as<S, element_of<const A&>>, "attn: the state, a and b must have one element type");
  x.a = as_view(a), x.b = as_view(b);
  return x;
}

/// What all items share, as a view of rank 4.
template <class S>
tensor_view<S> in_one_item(const tensor_view<S, 3>& x) {
  return {x.data(), {1, x.extent(0), x.extent(1), x.extent(2)}, {0, x.stride(0), x.stride(1), x.stride(2)}};
}

/// Names the views that a call reads, once for all operators of the family. Their extents are checked afterwards.
template <class S, class T>
void name_inputs(call_views& check, const kernel_views<S>& x, const kernel_call<T>& call) {
  const recurrence_parameters<T>& o = call.recurrence;
  check.read("q", x.q), check.read("k", x.k), check.read("v", x.v);
  check.option("d_out", x.d_out), check.option("features", x.features);
  check.option("a", x.a), check.option("b", x.b);
  check.option(call.gate_name(), call.gate), check.option("beta", o.beta), check.option("log_decay", o.log_decay);
  check.option("bonus", o.bonus);
  check.option("initial_state", o.initial_state), check.option("initial_weights", o.initial_weights);
}
/// The same of a forward call, with those that it writes.
template <class S, class T>
void name_views(call_views& check, const kernel_views<S>& x, const kernel_call<T>& call) {
  name_inputs(check, x, call);
  check.write("out", x.out);
  if (const auto& state = call.recurrence.final_state) check.write("final_state", state);
  if (const auto& weights = call.recurrence.final_weights) check.write("final_weights", weights);
}

/// Checks that memory can hold the sums of so many features.
inline void check_feature_count(const validator& check, idx_t features, const attention_shape& s) {
  check.at_least("features", 0, features);
  check.fits("features", {features, std::max<idx_t>(s.dim_v, 64), sizeof(double)});
}

/// Is a parameter there for every query head, or for every key head?
inline bool fits_heads(idx_t parameter_heads, const attention_shape& s) {
  return parameter_heads == s.kv_heads || (parameter_heads == s.heads && s.heads > 0);
}
[[gnu::noinline]] inline void check_heads(const validator& check, const char* what, idx_t heads,
                                          const attention_shape& s) {
  if (!fits_heads(heads, s))
    check.fail({what, " heads = query heads ", s.heads, " or key heads ", s.kv_heads}, heads);
}

[[gnu::noinline]] inline void check_features(const validator& check, const memory_layout& w, const attention_shape& s) {
  if (w.extents[0] != 1 && !fits_heads(w.extents[0], s))
    check.fail({"features for 1, ", s.heads, " or ", s.kv_heads, " heads"}, w.extents[0]);
  check.at_least("features", 1, w.extents[1]);
  check_feature_count(check, w.extents[1], s);
  check.equal("feature columns = query dim", s.dim, w.extents[2]);
}

/// Gates [B, H or Hkv, L]: from 0 to 1 for every real token.
template <class T>
void check_gates(const validator& check, const char* what, const tensor_view<const T, 3>& gate,
                 const attention_shape& s, const sequence_lengths& lengths) {
  if (gate.extent(0) != s.batch) check.fail({what, " batch = query batch ", s.batch}, gate.extent(0));
  check_heads(check, what, gate.extent(1), s);
  if (gate.extent(2) != s.keys) check.fail({what, " length = key length ", s.keys}, gate.extent(2));
  for (idx_t b = 0; b < s.batch; ++b)
    for (idx_t h = 0; h < gate.extent(1); ++h)
      for (idx_t t = 0; t < lengths.keys(b); ++t)
        if (const T g = gate(b, h, t); !(g >= T(0) && g <= T(1)))
          check.fail({what, " from 0 to 1"}, static_cast<double>(g));
}

[[gnu::noinline]] inline void check_finite(const validator& check, const char* what, double x) {
  if (!(x >= 0) || x == std::numeric_limits<double>::infinity()) check.fail({what, " >= 0, and finite"}, x);
}

/// The checks of what only performer has.
template <class T>
void check_performer(const validator& check, kernel_call<T>& call) {
  if (call.given_scale) check_finite(check, "scale", static_cast<double>(*call.given_scale));
  if (call.feature_eps) {
    check_finite(check, "feature_eps", static_cast<double>(*call.feature_eps));
    if (*call.feature_eps > 0 && call.kernel != performer_kernel::relu) {
      if (call.kernel != performer_kernel::positive) check.fail("feature_eps with kernel positive or relu", "another");
      if (call.causal) check.fail("no causal with feature_eps, which takes a maximum over all keys", "causal");
      call.eps *= static_cast<T>(call.projection.extents[2]);  // of features that are not divided by their number
    }
  }
  if (call.center_keys && call.causal) check.fail("no causal with center_keys, a mean over all keys", "causal");
}

/// Checks the parameters of a call of this shape, whose views are named, and fills it in except its map. Tokens appended
/// without queries have as many query heads as the state.
template <class S, class T>
void check_parameters(call_views& check, kernel_call<T>& call, const attention_shape& shape, const kernel_views<S>& x,
                      idx_t state_heads) {
  call.shape = shape;
  call.lengths = check_lengths(check, shape, call.both_lengths, call.query_lengths, call.key_lengths);
  attention_shape s = call.shape;
  if (s.heads == 0 && s.kv_heads > 0 && state_heads % s.kv_heads == 0) s.heads = state_heads;
  call.query_heads = s.heads;
  call.heads = s.kv_heads;
  call.key_mask.validate(check, s.batch, s.keys);
  if (x.takes_features) {
    check_features(check, x.features, s);
    call.take_heads_of(x.features.extent(0));
    call.projection = in_one_item(x.features);
  }
  check_finite(check, "eps", static_cast<double>(call.eps));
  check_finite(check, "norm_eps", static_cast<double>(call.norm_eps));
  if (call.gate) {
    if (!call.causal) check.fail(call.complement ? "causal with a gate" : "causal with decay", "no causal");
    check_gates(check, call.gate_name(), call.gate, s, call.lengths);
    call.take_heads_of(call.gate.extent(1));
  }
  check_performer(check, call);
}
/// The checks that all operators of feature sums share. The options become the parameters in their place in the call.
template <class S, class Options>
auto check_kernel(call_views& check, const kernel_views<S>& x, const Options& given, idx_t state_heads = 0) {
  kernel_call<compute_type<S>> call{given, x.q, x.k, x.v, x.out};
  name_views(check, x, call);
  check_parameters(check, call, check_attention_extents(check, x.q, x.k, x.v, x.out), x, state_heads);
  return call;
}

}}}  // namespace attn::ATTN_ISA::detail
