// attn: a backward call of kernel attention: its views, the checks that all operators of the family share, and how it
// is run.
#pragma once

#include <attn/core/detail/gradients.hpp>
#include <attn/kernel/detail/driver_backward.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The forward call of a checked backward call by an operator of feature sums.
template <class S, class Gradients, class Options>
auto check_kernel_backward(call_views& check, const kernel_views<S>& x, const Gradients& g, const Options& options) {
  read_inputs(check, x, options);
  name_gradients(check, x, g, options);
  memory_layout out = x.q;  // of the shape out has
  out.extents[3] = x.v.extent(3);
  const attention_shape s = check_attention_extents(check, x.q, x.k, x.v, out);
  check.extents({{"d_out batch = query batch", s.batch, x.d_out.extent(0)},
                 {"d_out heads = query heads", s.heads, x.d_out.extent(1)},
                 {"d_out length = query length", s.queries, x.d_out.extent(2)},
                 {"d_out dim = value dim", s.dim_v, x.d_out.extent(3)}});
  return check_parameters(check, s, x, options, 0);
}

/// The gradient of the features, where wanted: the sum over all heads of sums that share a matrix, in order.
template <class S, class Gradients, class T>
void store_feature_gradients(const kernel_views<S>& x, const Gradients& g, const kernel_call<T>& call,
                             const kernel_sums<T>* sums) {
  if constexpr (requires { g.features; }) {
    if (!g.features) return;
    const auto& w = x.features;
    const idx_t each = call.heads > 0 ? call.heads / w.extent(0) : 0;
    for (idx_t h = 0; h < w.extent(0); ++h)
      for (idx_t r = 0; r < w.extent(1); ++r)
        for (idx_t d = 0; d < w.extent(2); ++d) {
          T sum = T(0);
          for (idx_t b = 0; b < call.shape.batch; ++b)
            for (idx_t n = 0; n < each; ++n) sum += sums[b * call.heads + h * each + n].value(r, d);
          store_gradient(g.features(h, r, d), sum, g.accumulate);
        }
  }
}

/// Runs a checked call by sums of features.
template <class S, class Gradients, class T>
void run_sums_backward(const kernel_backward_call<T>& wanted, const kernel_views<S>& x, const Gradients& g,
                       execution& exec) {
  const kernel_backward<T> one{wanted};
  backward_driver<T> driver{{one}};
  driver.run(exec, x.features.extent(1));
  store_feature_gradients(x, g, wanted.call, driver.feature_sums);
}

/// A backward call of an operator of feature sums, as run_kernel; back(map) gives its feature_map_backward.
template <class S, class Gradients, class Operator, class T = compute_type<S>>
void run_kernel_backward(const char* name, const kernel_views<S>& x, const Gradients& g, Operator one,
                         execution& exec) {
  if constexpr (Operator::usable()) {
    call_views check{name};
    kernel_call<T> call = check_kernel_backward(check, x, g, one.options);
    one.validate(check, call);
    auto map = one.map(call);
    auto back = one.back(map);
    call.map = &map;
    const auto wanted = backward_call_of<S>(call, x, g, &back);
    if (!wanted.any()) return;
    if constexpr (Operator::may_recur)
      if (call.driver == kernel_driver::recurrence) return recurrence_backward_driver<rule::add, T>{wanted}.run(exec);
    run_sums_backward(wanted, x, g, exec);
  }
}

}}}  // namespace attn::ATTN_ISA::detail
