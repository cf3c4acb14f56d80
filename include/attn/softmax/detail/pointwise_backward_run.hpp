// attn: the driver of pointwise_backward, which is that of full_softmax_backward, with a window too.
#pragma once

#include <attn/softmax/detail/full_softmax_backward_run.hpp>
#include <attn/softmax/detail/pointwise_run.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Stores the gradient of the rows' factors, summed over heads and what they were broadcast over.
template <class S, class F, class T = compute_type<S>>
void store_row_weights(const softmax_backward_call<S, F, no_score_backward>& call, const tensor_view<T, 2>& to) {
  const attention_shape& s = call.shape;
  for (idx_t n = 0; n < to.extent(0); ++n)
    for (idx_t i = 0; i < s.queries; ++i) {
      double sum = 0;
      for (idx_t b = to.extent(0) == 1 ? 0 : n; b < (to.extent(0) == 1 ? s.batch : n + 1); ++b)
        for (idx_t h = 0; h < s.heads && i < call.lengths().queries(b); ++h)
          sum += call.row_list(call.sums_of(b * s.heads + h))[i];
      store_gradient(to(n, i), static_cast<T>(sum) * call.terms().score->weight, call.accumulate);
    }
}

/// Of keys up to `left` before and `right` after the query's own.
template <class S, class F>
void run_pointwise_backward(softmax_backward_call<S, F, no_score_backward>& call, idx_t left, idx_t right,
                            const tensor_view<compute_type<S>, 2>& d_row_weights) {
  const attention_shape& s = call.shape;
  call.sum_rows = bool(d_row_weights);
  call.left = (std::min)(left, call.furthest), call.right = (std::min)(right, call.furthest);
  if (!call.accumulate && call.d_bias) clear_gradient(call.d_bias);
  const double share = call.forward.causal ? 0.5 : 1.0, keys = static_cast<double>(s.keys) * share,
               seen = (std::min)(keys, static_cast<double>(call.left) + static_cast<double>(call.right) + 1);
  softmax_backward_work work(call, 2.5 * s.operations_per_score() * static_cast<double>(s.queries) * seen);
  full_softmax_backward_driver<S, F, no_score_backward, S>{call}.run();
  work.store_parameters();
  store_row_weights<S>(call, d_row_weights);
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN(S) void run_pointwise_backward(                                                                       \
  softmax_backward_call<S, pointwise_function<compute_type<S>>, no_score_backward>&, idx_t, idx_t,                     \
  const tensor_view<compute_type<S>, 2>&)
#include <attn/core/detail/compiled.hpp>
