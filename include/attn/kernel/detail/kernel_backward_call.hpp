// attn: a backward call of kernel attention: its views, the checks that all operators of the family share, and how it
// is run.
#pragma once

#include <attn/core/detail/gradients.hpp>
#include <attn/kernel/detail/driver_backward.hpp>
#include <attn/kernel/detail/kernel_checks.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The arguments of a backward call as views; `gate` is named `gate_name`.
template <class S, class T = compute_type<S>>
struct kernel_backward_views {
  kernel_views<S> x;  // without out
  tensor_view<const S> d_out;
  tensor_view<S> dq, dk, dv;
  tensor_view<S, 3> d_features{};
  const char* gate_name = nullptr;
  tensor_view<const T, 3> gate{};
  tensor_view<T, 3> d_gate{};
  bool accumulate = false;
};

template <class S, class Q, class K, class V, class D, class Gradients>
kernel_backward_views<S> backward_views_of(const Q& q, const K& k, const V& v, const D& d_out, const Gradients& g) {
  require_one_element_type<const Q&, const K&, const V&, tensor_view<S>>();
  require_one_element_type<const D&, const D&, const D&, tensor_view<S>>();
  return {.x = {as_view(q), as_view(k), as_view(v), {}}, .d_out = as_view(d_out), .dq = g.q, .dk = g.k, .dv = g.v,
          .accumulate = g.accumulate};
}

/// The forward call of a checked backward call.
template <bool takes_features, class S, class Options, class T = compute_type<S>>
kernel_call<T> check_kernel_backward(call_views& check, const kernel_backward_views<S>& a, const Options& options,
                                     bool complement = false) {
  const kernel_views<S>& x = a.x;
  check.read("q", x.q), check.read("k", x.k), check.read("v", x.v), check.read("d_out", a.d_out);
  check.gradient("q", a.dq, x.q);
  check.gradient("k", a.dk, x.k);
  check.gradient("v", a.dv, x.v);
  memory_layout out = x.q;  // of the shape out has
  out.extents[3] = x.v.extent(3);
  const attention_shape s = check_attention_extents(check, x.q, x.k, x.v, out);
  check.extents({{"d_out batch = query batch", s.batch, a.d_out.extent(0)},
                 {"d_out heads = query heads", s.heads, a.d_out.extent(1)},
                 {"d_out length = query length", s.queries, a.d_out.extent(2)},
                 {"d_out dim = value dim", s.dim_v, a.d_out.extent(3)}});
  if constexpr (takes_features) check.gradient("features", a.d_features, x.features);
  if (a.gate_name) check.gradient(a.gate_name, a.d_gate, a.gate);
  return check_parameters<takes_features>(check, s, x, options, state_step<T>{}, a.gate, complement);
}

template <class S, class T = compute_type<S>>
kernel_backward<T> kernel_backward_of(const kernel_backward_views<S>& a, kernel_call<T>& call,
                                      feature_map_backward<T>& back) {
  return {.call = call, .map = back, .d_out = a.d_out, .dq = {a.dq, a.accumulate}, .dk = {a.dk, a.accumulate},
          .dv = {a.dv, a.accumulate}, .d_gate = a.d_gate, .d_features = bool(a.d_features), .accumulate = a.accumulate};
}

/// The gradient of the features, where wanted: the sum over all heads of sums that share a matrix, in order.
template <class S, class T>
void store_feature_gradients(const kernel_backward_views<S>& a, const kernel_call<T>& call,
                             const kernel_sums<T>* sums) {
  if (!a.d_features) return;
  const auto& w = a.x.features;
  const idx_t each = call.heads > 0 ? call.heads / w.extent(0) : 0;
  for (idx_t h = 0; h < w.extent(0); ++h)
    for (idx_t r = 0; r < w.extent(1); ++r)
      for (idx_t d = 0; d < w.extent(2); ++d) {
        T sum = T(0);
        for (idx_t b = 0; b < call.shape.batch; ++b)
          for (idx_t n = 0; n < each; ++n) sum += sums[b * call.heads + h * each + n].value(r, d);
        store_gradient(a.d_features(h, r, d), sum, a.accumulate);
      }
}

/// Runs a checked call.
template <class S, class T = compute_type<S>>
void run_kernel_backward(const kernel_backward_views<S>& a, kernel_call<T>& call, feature_map<T>& map,
                         feature_map_backward<T>& back, execution& exec) {
  call.map = &map;
  const auto one = kernel_backward_of(a, call, back);
  if (!one.of_queries() && !one.reverse()) return;
  backward_driver<T>{one}.run(exec, a.x.features.extent(1),
                              [&](const kernel_sums<T>* sums) { store_feature_gradients(a, call, sums); });
}

}}}  // namespace attn::ATTN_ISA::detail
