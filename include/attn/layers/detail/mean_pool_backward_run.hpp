// attn: a call of the gradient of mean_pool, its checks and its run.
#pragma once

#include <attn/layers/detail/mean_pool_run.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct mean_pool_gradients;

namespace detail {

template <class S>
[[gnu::noinline]] void call_mean_pool_backward(const tensor_view<const S, 3>& x, const tensor_view<const S, 3>& d_out,
                                               const mean_pool_gradients<S>& gradients,
                                               const pool_choice& tokens, execution& exec) {
  using T = compute_type<S>;
  call_views check{"mean_pool_backward"};
  check.readable("x", x);
  check.read("d_out", d_out);
  check.gradient("x", gradients.x, x);
  check_pool(check, x, "d_out rows = x batch", d_out, tokens);
  if (!gradients.x) return;
  const input_tokens<T> from(d_out);
  const output_tokens<T> to(gradients.x);
  for_each_pool(x, exec, [&](idx_t b, idx_t first, idx_t count, int worker) {
    T* const rows = exec.scratch(worker, [&](arena& memory) { return memory.allocate<T>(2 * count); });
    const T n = static_cast<T>(std::max<idx_t>(tokens.count(b), 1));
    from.any_rows<T>::load(b, first, count, rows);
    for (idx_t d = 0; d < count; ++d) rows[d] /= n;
    std::fill_n(rows + count, count, T(0));
    for (idx_t i = 0; i < tokens.length; ++i) {
      if (tokens.takes(b, i))
        to.store(b * tokens.length + i, first, count, rows, gradients.accumulate);
      else if (!gradients.accumulate)
        to.store(b * tokens.length + i, first, count, rows + count);
    }
  });
}

}  // namespace detail
}}  // namespace attn::ATTN_ISA
