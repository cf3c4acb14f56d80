// attn: the gradient of fnet.
//
//   dx_td = sum over l, c of d_out_lc cos(2 pi (l t / L + c d / D)), that is dx = fnet(d_out)
//
//   attn::fnet(x, out, {.lengths = lengths}, threads);
//   attn::fnet_backward(d_out, {.x = dx}, {.lengths = lengths}, threads);
//   attn::fnet_backward(d_out, {.x = dx, .accumulate = true});        // dx += fnet(d_out)
//
// The transform is linear and its own adjoint: nothing of the forward call is needed, neither x nor out, so neither is
// an argument. Rows of padding have gradient 0, and what lies there in d_out is not read.
//
// Shapes   d_out and dx [B, H, L, D], as x.
// Cost     time and scratch of fnet; nothing where dx is not given. Adding reads dx once more.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
#pragma once

#include <attn/core/detail/gradients.hpp>
#include <attn/fourier/fnet.hpp>

namespace attn { inline namespace ATTN_ISA {

/// What fnet_backward writes. S is the element type of the call.
template <class S>
struct fnet_gradients {
  view_field<S> x{};
  bool accumulate = false;  // add to what is there instead of writing it over
};

namespace detail {

inline void check_fnet_backward(const memory_layout& d_out, const memory_layout& dx, std::span<const idx_t> lengths) {
  call_views views("fnet_backward");
  views.read("d_out", d_out);
  views.write("the gradient of x", dx);
  if (dx.given()) check_same_shape(views, "the gradient of x", dx, "d_out", d_out);
  check_length_list(views, "lengths", lengths, d_out.extents[0], d_out.extents[2]);
}

}  // namespace detail

template <viewable D, class Options = fnet_options<element_of<const D&>>>
void fnet_backward(const D& d_out, const fnet_gradients<element_of<const D&>>& gradients, Options&& options = {},
                   execution_ref exec = {}) {
  using S = element_of<const D&>;
  detail::require_one_element_type<const D&, const D&, const D&, tensor_view<S>>();
  const tensor_view<const S> from = as_view(d_out);
  const auto& given = detail::options_or_default<fnet_options<S>>(options);
  detail::check_fnet_backward(from, gradients.x, given.lengths);
  const tensor_view<S> to = gradients.x;
  if (to)
    detail::run_fnet_backward<S>({.x = from, .out = to, .lengths = given.lengths, .accumulate = gradients.accumulate},
                                 detail::plain_execution_of("fnet_backward", exec, options));
}

}}  // namespace attn::ATTN_ISA
