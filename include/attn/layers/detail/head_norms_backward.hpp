// attn: the way back through the norms of head_norms.hpp.
#pragma once

#include <attn/layers/detail/head_norms.hpp>
#include <attn/layers/layer_norm_backward.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// d, the gradient of the norm of x (with `more`, if that is given), becomes that of x; adds up that of gamma.
template <class S>
void normalise_heads_backward(const tensor_view<S, 3>& x, const tensor_view<const S, 1>& gamma, compute_type<S> eps,
                              const tensor_view<S, 3>& d, const tensor_view<S, 3>& more,
                              const tensor_view<S, 1>& d_gamma, bool accumulate, execution& exec) {
  using T = compute_type<S>;
  const idx_t dim = gamma.extent(0);
  const tensor_view<S, 3> rows = rows_of_norm(d, dim);
  const token_sum<T> sum = more ? token_sum<T>(rows, rows_of_norm(more, dim)) : token_sum<T>(rows);
  auto norm = exec.workspace([dim](arena& memory) { return row_norm<T>(memory, dim); });
  set_norm_of_heads<S>(*norm, gamma, eps);
  norm_backward_driver<T>{.norm = *norm, .x = input_tokens<T>(rows_of_norm(x, dim)), .d = sum,
                          .residual = tensor_view<const T, 3>(), .dx = {rows, false},
                          .copy = {tensor_view<T, 3>(), false}, .gamma = {d_gamma, accumulate},
                          .beta = {tensor_view<T, 1>(), false}}
      .run(exec);
}

}}}  // namespace attn::ATTN_ISA::detail
