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

#include <attn/layers/detail/mean_pool_backward_run.hpp>
#include <attn/layers/mean_pool.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct mean_pool_gradients {
  view_field<S, 3> x{};
  bool accumulate = false;  // add to what is there instead of writing it over
};

template <viewable X, viewable D, class Options = mean_pool_options>
void mean_pool_backward(const X& x, const D& d_out, const mean_pool_gradients<element_of<const X&>>& gradients,
                        Options&& options = {}, execution_ref exec = {}) {
  using S = element_of<const X&>;
  static_assert(element<S>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");
  static_assert(std::same_as<S, element_of<const D&>>, "attn: the sequences of a layer must have one element type");
  const auto from = detail::as_sequence(x);
  const auto& given = detail::options_or_default<mean_pool_options>(options);
  detail::call_mean_pool_backward<S>(from, detail::as_rows(d_out), gradients,
                                     {given.lengths, given.mask, from.extent(1)},
                                     detail::plain_execution_of("mean_pool_backward", exec, options));
}

}}  // namespace attn::ATTN_ISA

#define ATTN_RUN(S) void call_mean_pool_backward<S>(const tensor_view<const S, 3>&, const tensor_view<const S, 3>&,    \
  const mean_pool_gradients<S>&, const pool_choice&, execution&)
#include <attn/core/detail/compiled.hpp>
