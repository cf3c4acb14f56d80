// attn: the gradients of rms_norm.
//
//   with z = x r, r = 1 / sqrt(mean(x^2) + eps), g = gamma d_out (out = gamma z):
//   dx = r (g - z mean(g z)),   dgamma = sum over tokens of d_out z
//
//   attn::rms_norm(x, out, {.gamma = g}, threads);
//   attn::rms_norm_backward(x, {.gamma = g}, d_out, {.x = dx, .gamma = dg}, {}, threads);
//   attn::rms_norm_backward(x, {}, d_out, {.x = dx});                   // without gamma
//
// Shapes   x, weights and options as the forward call's, d_out as its out, not needed; gradients as what they are of.
// Cost     some 12 operations a number; scratch: a few rows, per thread two rows of sums more.
// Throws   as the forward call, and for gradients of what was not given or in memory of an input or another gradient.
//
// A token whose d_out is 0 has gradient 0 and adds nothing, whatever its x is: so has padding, NaN or not.
#pragma once

#include <attn/layers/layer_norm_backward.hpp>
#include <attn/layers/rms_norm.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct rms_norm_gradients {
  view_field<S, 3> x{};
  view_field<S, 1> gamma{};
  bool accumulate = false;  // add to what is there instead of writing it over
};

template <viewable X, viewable D, class Weights = rms_norm_weights<element_of<const X&>>,
          class Options = rms_norm_options<element_of<const X&>>>
void rms_norm_backward(const X& x, const Weights& weights, const D& d_out,
                       const rms_norm_gradients<element_of<const X&>>& gradients, Options&& options = {},
                       execution_ref exec = {}) {
  using S = element_of<const X&>;
  const auto [from, d] = detail::inputs_of(x, d_out);
  detail::call_norm_backward<S>("rms_norm_backward", false, 1, from,
                                {.gamma = detail::weights_of<rms_norm_weights<S>>(weights).gamma}, d,
                                {.x = gradients.x, .gamma = gradients.gamma, .accumulate = gradients.accumulate},
                                detail::options_or_default<rms_norm_options<S>>(options).eps,
                                detail::plain_execution_of("rms_norm_backward", exec, options));
}

}}  // namespace attn::ATTN_ISA
