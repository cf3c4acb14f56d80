// attn: a call of kernel attention: its views, the checks that all operators of the family share, and how it is run.
#pragma once

#include <attn/core/detail/attention_call.hpp>
#include <attn/core/mask_view.hpp>
#include <attn/kernel/detail/driver.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class T>
class kernel_state;

namespace detail {

/// The arguments of a call as views.
template <class S>
struct kernel_views {
  tensor_view<const S> q, k, v;
  tensor_view<S> out;
  tensor_view<const S, 3> features{};  // of performer and rfa
};

template <class S, class Q, class K, class V, class O>
kernel_views<S> views_of(const Q& q, const K& k, const V& v, O& out) {
  require_one_element_type<const Q&, const K&, const V&, O&>();
  static_assert(std::same_as<S, element_of<const Q&>>, "attn: the state and q must have one element type");
  return {as_view(q), as_view(k), as_view(v), as_view(out)};
}

/// The same with the caller's features [H, Hkv or 1, count, dim].
template <class S, class W>
kernel_views<S> with_features(kernel_views<S> x, const W& w) {
  constexpr bool fits = std::convertible_to<const W&, tensor_view<const S, 3>>;
  static_assert(
      fits,
      "attn: performer and rfa take random features after out: a view [heads or 1, features, dim] or an Eigen "
      "matrix [features, dim] of the element type of q, such as attn::draw_features<float>(256, 64)");
  if constexpr (fits) x.features = w;
  return x;
}

/// What makes a call a step: the state, and how it is run (kernel_steps.hpp).
template <class T>
struct state_step {
  kernel_state<T>* state = nullptr;
  idx_t heads = 0;
  void (*run)(call_views&, kernel_call<T>&, kernel_state<T>&, execution&) = nullptr;
};

/// Checks that memory can hold the sums of so many features.
inline void check_feature_count(const validator& check, idx_t features, const attention_shape& s) {
  check.at_least("features", 0, features);
  check.fits("features", {features, std::max<idx_t>(s.dim_v, 64), sizeof(double)});
}

/// Is a parameter there for every query head, or for every key head?
inline bool fits_heads(idx_t parameter_heads, const attention_shape& s) {
  return parameter_heads == s.kv_heads || (parameter_heads == s.heads && s.heads > 0);
}

[[gnu::noinline]] inline void check_features(call_views& check, const memory_layout& w, const attention_shape& s) {
  check.read("features", w);
  if (w.extents[0] != 1 && !fits_heads(w.extents[0], s))
    check.fail({"features for 1, ", s.heads, " or ", s.kv_heads, " heads"}, w.extents[0]);
  check.at_least("features", 1, w.extents[1]);
  check_feature_count(check, w.extents[1], s);
  check.equal("feature columns = query dim", s.dim, w.extents[2]);
}

/// Gates [B, H or Hkv, L]: from 0 to 1 for every real token.
template <class T>
void check_gates(call_views& check, const char* what, const tensor_view<const T, 3>& gate, const attention_shape& s,
                 const sequence_lengths& lengths) {
  check.read(what, gate);
  if (gate.extent(0) != s.batch) check.fail({what, " batch = query batch ", s.batch}, gate.extent(0));
  if (!fits_heads(gate.extent(1), s))
    check.fail({what, " heads = query heads ", s.heads, " or key heads ", s.kv_heads}, gate.extent(1));
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

/// Checks a mask of keys, and gives it to the call.
template <class T>
void check_key_mask(call_views& check, kernel_call<T>& call, const key_mask_view& mask) {
  check.option("key_mask", mask.bytes(), {{"key_mask batch", call.shape.batch, or_one},
                                          {},
                                          {},
                                          {"key_mask length = key length", call.shape.keys}});
  call.key_mask = mask.bytes();
}

/// Checks the options and parameters of a call of this shape, and fills in the call except its map. With `complement`,
/// keys enter with 1 - gate.
template <bool takes_features, class S, class Options, class T = compute_type<S>>
kernel_call<T> check_parameters(call_views& check, const attention_shape& shape, const kernel_views<S>& x,
                                const Options& options, const state_step<T>& step,
                                const tensor_view<const T, 3>& gate, bool complement) {
  kernel_call<T> call{.q = x.q, .k = x.k, .v = x.v, .out = x.out, .shape = shape, .causal = options.causal,
                      .eps = options.eps, .gate = gate, .complement = complement};
  call.lengths = check_lengths(check, call.shape, options);
  // Tokens appended without queries have as many query heads as the state.
  attention_shape s = call.shape;
  if (s.heads == 0 && s.kv_heads > 0 && step.heads % s.kv_heads == 0) s.heads = step.heads;
  call.query_heads = s.heads;
  call.heads = s.kv_heads;
  check_key_mask(check, call, options.key_mask);
  const auto own_sums = [&](idx_t heads) {
    if (heads == s.heads && heads > s.kv_heads) call.heads = heads;
  };
  if constexpr (takes_features) {
    const tensor_view<const S, 3>& w = x.features;
    check_features(check, w, s);
    own_sums(w.extent(0));
    call.projection = tensor_view<const S>(w.data(), {1, w.extent(0), w.extent(1), w.extent(2)},
                                         {0, w.stride(0), w.stride(1), w.stride(2)});
  }
  check_finite(check, "eps", static_cast<double>(options.eps));
  if (gate) {
    if (!call.causal) check.fail(complement ? "causal with a gate" : "causal with decay", "no causal");
    check_gates(check, complement ? "gate" : "decay", gate, s, call.lengths);
    own_sums(gate.extent(1));
  }
  return call;
}

/// The checks that all operators of kernel attention share.
template <bool takes_features, class S, class Options, class T = compute_type<S>>
kernel_call<T> check_kernel(call_views& check, const kernel_views<S>& x, const Options& options,
                            const state_step<T>& step, const tensor_view<const T, 3>& gate = {},
                            bool complement = false) {
  const attention_shape s = check_attention(check, x.q, x.k, x.v, x.out, {});
  return check_parameters<takes_features>(check, s, x, options, step, gate, complement);
}

/// Runs a checked call whose map is given. Operators that are never a recurrence do not compile it.
template <bool may_recur, class T>
void run_driver(const kernel_call<T>& call, execution& exec) {
  if constexpr (may_recur)
    if (call.driver == kernel_driver::recurrence) return recurrence_driver<rule::add, T>{call}.run(exec);
  call.run(exec);
}

/// Runs a checked call or step.
template <bool may_recur = false, class T>
void run_kernel(call_views& check, kernel_call<T>& call, feature_map<T>& map, const state_step<T>& step,
                execution& exec) {
  call.map = &map;
  if (step.state)
    step.run(check, call, *step.state, exec);
  else
    run_driver<may_recur>(call, exec);
}

}  // namespace detail
}}  // namespace attn::ATTN_ISA
