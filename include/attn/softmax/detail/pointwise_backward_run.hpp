// attn: the driver of pointwise_backward, which is that of full_softmax_backward, with a window too.
#pragma once

#include <attn/softmax/detail/full_softmax_backward_run.hpp>
#include <attn/softmax/detail/pointwise_run.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// A call with its window and its own gradient. `out`, which is not read, has the shape of d_out.
template <class S, class F>
struct pointwise_backward_call : softmax_backward_call<S, F, no_score_backward> {
  tensor_view<compute_type<S>, 2> d_row_weights{};
};

/// Checks a call, and fills in what the backward pass of softmax attention takes.
template <template <class> class Options, class Q, class K, class V, class D, class Gradients, class F>
auto checked_pointwise_backward(const Q& q, const K& k, const V& v, const D& d_out, const Gradients& gradients,
                                const Options<element_of<const Q&>>& given, F& weights, execution_ref& exec) {
  using S = element_of<const Q&>;
  auto checked = checked_backward_call<Options>("pointwise_backward", q, k, v, d_out, gradients, given, exec);
  call_views& views = checked.views;
  const attention_shape& s = checked.shape;
  check_pointwise(checked);
  views.at_least("right", 0, given.right);
  const auto parameters = parameters_of<S>(given);
  check_softmax_options(views, s, parameters);
  views.gradient("bias", gradients.bias, given.bias);
  views.gradient("relative_bias", gradients.relative_bias, given.relative_bias);
  views.gradient("alibi_slopes", gradients.alibi_slopes, list_layout(given.alibi_slopes));
  views.gradient("row_weights", gradients.row_weights, given.row_weights);
  pointwise_backward_call<S, F> call{
      {.forward = {{}, validator("pointwise_backward"), {.score = &weights}, checked.exec},
       .q = checked.q, .k = checked.k, .v = checked.v, .out = as_view(d_out), .d_out = as_view(d_out), .shape = s,
       .dq = gradients.q, .dk = gradients.k, .dv = gradients.v, .d_slopes = gradients.alibi_slopes,
       .d_bias = gradients.bias, .d_relative_bias = gradients.relative_bias, .d_lse = {},
       .accumulate = gradients.accumulate, .score_backward = nullptr},
      gradients.row_weights};
  auto& forward = call.forward;
  static_cast<attention_views<S>&>(forward) = {
      checked.q, checked.k, checked.v.slice(3, 0, 0), {nullptr, {s.batch, s.heads, s.queries, 0}}};
  set_options(forward, s, parameters);
  forward.shape.dim_v = 0;
  call.furthest = forward.furthest();
  call.sum_rows = bool(gradients.row_weights);
  call.left = (std::min)(given.left, call.furthest), call.right = (std::min)(given.right, call.furthest);
  return call;
}

/// Stores the gradient of the rows' factors, summed over heads and what they were broadcast over.
template <class S, class F>
void store_row_weights(const pointwise_backward_call<S, F>& call) {
  using T = compute_type<S>;
  const attention_shape& s = call.shape;
  const auto& to = call.d_row_weights;
  for (idx_t n = 0; n < to.extent(0); ++n)
    for (idx_t i = 0; i < s.queries; ++i) {
      double sum = 0;
      for (idx_t b = to.extent(0) == 1 ? 0 : n; b < (to.extent(0) == 1 ? s.batch : n + 1); ++b)
        for (idx_t h = 0; h < s.heads && i < call.lengths().queries(b); ++h)
          sum += call.row_list(call.sums_of(b * s.heads + h))[i];
      store_gradient(to(n, i), static_cast<T>(sum) * call.terms().score->weight, call.accumulate);
    }
}

template <class S, class F>
void run_pointwise_backward(pointwise_backward_call<S, F>& call) {
  const attention_shape& s = call.shape;
  if (!call.accumulate && call.d_bias) clear_gradient(call.d_bias);
  const double share = call.forward.causal ? 0.5 : 1.0, keys = static_cast<double>(s.keys) * share,
               seen = (std::min)(keys, static_cast<double>(call.left) + static_cast<double>(call.right) + 1);
  softmax_backward_work work(call, 2.5 * s.operations_per_score() * static_cast<double>(s.queries) * seen);
  full_softmax_backward_driver<S, F, no_score_backward, S>{call}.run();
  work.store_parameters();
  store_row_weights(call);
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN(S) void run_pointwise_backward(                                                                       \
  pointwise_backward_call<S, pointwise_function<compute_type<S>>>&)
#include <attn/core/detail/compiled.hpp>
