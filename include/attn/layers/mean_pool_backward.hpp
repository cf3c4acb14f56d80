// attn: the gradient of mean_pool.
//
//   dx_(b, i) = d_out_b / n_b for the n_b tokens that are taken, 0 for the others
//
//   attn::mean_pool_backward(x, d_out, {.x = dx}, {.lengths = lengths}, threads);
//
// Shapes   x and options as the forward call's, of x only its shape is read; d_out [B, D], as out; dx like x.
// Cost     B L D numbers written; scratch: 256 numbers per thread.
// Throws   std::invalid_argument for shapes that do not fit, before anything is written.
#pragma once

#include <attn/layers/mean_pool.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct mean_pool_gradients {
  view_field<S, 3> x{};
  bool accumulate = false;  // add to what is there instead of writing it over
};

namespace detail {

template <class S>
[[gnu::noinline]] void call_mean_pool_backward(const tensor_view<const S, 3>& x, const tensor_view<const S, 3>& d_out,
                                               const mean_pool_gradients<S>& gradients,
                                               const mean_pool_options& options, execution& exec) {
  using T = compute_type<S>;
  call_views check{"mean_pool_backward"};
  check.readable("x", x);
  check.read("d_out", d_out);
  check.gradient("x", gradients.x, x);
  const pool_choice tokens = check_pool(check, x, "d_out rows = x batch", d_out, options);
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

template <viewable X, viewable D, class Options = mean_pool_options>
void mean_pool_backward(const X& x, const D& d_out, const mean_pool_gradients<element_of<const X&>>& gradients,
                        Options&& options = {}, execution_ref exec = {}) {
  using S = element_of<const X&>;
  static_assert(element<S>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");
  static_assert(std::same_as<S, element_of<const D&>>, "attn: the sequences of a layer must have one element type");
  detail::call_mean_pool_backward<S>(detail::as_sequence(x), detail::as_rows(d_out), gradients,
                                     detail::options_or_default<mean_pool_options>(options),
                                     detail::plain_execution_of("mean_pool_backward", exec, options));
}

}}  // namespace attn::ATTN_ISA

#define ATTN_RUN(S) void call_mean_pool_backward<S>(const tensor_view<const S, 3>&, const tensor_view<const S, 3>&,    \
  const mean_pool_gradients<S>&, const mean_pool_options&, execution&)
#include <attn/core/detail/compiled.hpp>
