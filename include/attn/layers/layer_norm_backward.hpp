// attn: the gradients of layer_norm.
//
//   with z = (x - mean) r, r = 1 / sqrt(variance + eps), g = gamma d_out (out = gamma z + beta):
//   dx = r (g - mean(g) - z mean(g z)),   dgamma = sum over tokens of d_out z,   dbeta = sum over tokens of d_out
//
//   attn::layer_norm(x, out, {.gamma = g, .beta = b}, threads);
//   attn::layer_norm_backward(x, {.gamma = g, .beta = b}, d_out, {.x = dx, .gamma = dg, .beta = db}, {}, threads);
//   attn::layer_norm_backward(x, {}, d_out, {.x = dx});                 // without gamma and beta
//
// Shapes   x, weights and options as the forward call's, d_out as its out, not needed; gradients as what they are of.
// Cost     some 15 operations a number; scratch: a few rows, per thread four rows of sums more.
// Throws   as the forward call, and for gradients of what was not given or in memory of an input or another gradient.
//
// A token whose d_out is 0 has gradient 0 and adds nothing, whatever its x is: so has padding, NaN or not.
#pragma once

#include <attn/layers/detail/norm_backward_run.hpp>
#include <attn/layers/layer_norm.hpp>

namespace attn { inline namespace ATTN_ISA {

/// The gradients of layer_norm_weights.
template <class S>
struct layer_norm_weight_gradients {
  view_field<S, 1> gamma{}, beta{};
};

template <class S>
struct layer_norm_gradients {
  view_field<S, 3> x{};
  view_field<S, 1> gamma{}, beta{};
  bool accumulate = false;  // add to what is there instead of writing it over
};

template <viewable X, viewable D, class Weights = layer_norm_weights<element_of<const X&>>,
          class Options = layer_norm_options<element_of<const X&>>>
void layer_norm_backward(const X& x, const Weights& weights, const D& d_out,
                         const layer_norm_gradients<element_of<const X&>>& gradients, Options&& options = {},
                         execution_ref exec = {}) {
  using S = element_of<const X&>;
  const auto [from, d] = detail::inputs_of(x, d_out);
  detail::call_norm_backward<S>("layer_norm_backward", true, 1, from,
                                detail::weights_of<layer_norm_weights<S>>(weights), d, gradients,
                                detail::options_or_default<layer_norm_options<S>>(options).eps,
                                detail::plain_execution_of("layer_norm_backward", exec, options));
}

}}  // namespace attn::ATTN_ISA

#define ATTN_RUN(S) void call_norm_backward<S>(const char*, bool, idx_t, const tensor_view<const S, 3>&,               \
  const layer_norm_weights<S>&, const tensor_view<const S, 3>&, const layer_norm_gradients<S>&, compute_type<S>,       \
  execution&)
#include <attn/core/detail/compiled.hpp>
