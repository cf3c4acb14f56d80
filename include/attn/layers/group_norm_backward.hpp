// attn: the gradients of group_norm.
//
//   with z = (x - mean) r, r = 1 / sqrt(variance + eps), g = gamma d_out (out = gamma z + beta), means over a head:
//   dx = r (g - mean(g) - z mean(g z)),   dgamma = sum over tokens of d_out z,   dbeta = sum over tokens of d_out
//
//   attn::group_norm(x, out, {.gamma = g, .beta = b}, {.heads = 8}, threads);
//   attn::group_norm_backward(x, {.gamma = g, .beta = b}, d_out, {.x = dx, .gamma = dg, .beta = db}, {.heads = 8},
//                             threads);
//
// Shapes   x, weights and options as the forward call's, d_out as its out, not needed; gradients as what they are of.
// Cost     some 15 operations a number; scratch: gamma and beta, three rows of a head, per thread two tokens of sums.
// Throws   as the forward call, and for gradients of what was not given or in memory of an input or another gradient.
//
// A head of a token whose d_out is 0 has gradient 0 and adds nothing, whatever its x is: so has padding, NaN or not.
#pragma once

#include <attn/layers/group_norm.hpp>
#include <attn/layers/layer_norm_backward.hpp>

namespace attn { inline namespace ATTN_ISA {

/// The gradients group_norm_backward writes: those given of x, gamma and beta; .accumulate adds to what is there.
template <class S>
using group_norm_gradients = layer_norm_gradients<S>;

template <viewable X, viewable D, class Weights = group_norm_weights<element_of<const X&>>,
          class Options = group_norm_options<element_of<const X&>>>
void group_norm_backward(const X& x, const Weights& weights, const D& d_out,
                         const group_norm_gradients<element_of<const X&>>& gradients, Options&& options = {},
                         execution_ref exec = {}) {
  using S = element_of<const X&>;
  const auto [from, d] = detail::inputs_of(x, d_out);
  const auto& given = detail::options_or_default<group_norm_options<S>>(options);
  detail::call_norm_backward<S>("group_norm_backward", true, given.heads, from,
                                detail::weights_of<group_norm_weights<S>>(weights), d, gradients, given.eps,
                                detail::plain_execution_of("group_norm_backward", exec, options));
}

}}  // namespace attn::ATTN_ISA
