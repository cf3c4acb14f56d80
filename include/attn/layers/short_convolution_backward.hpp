// attn: the gradients of short_convolution.
//
//   with z the convolution before the activation f, x_t of t < 0 the initial state, g_t = d_out_t f'(z_t), 0 outside
//   the sequence:
//   dx_t[c] = sum over i < w of W[c, i] g_(t+w-1-i)[c], also for t < 0; the last w - 1 of them plus d_final_state
//   dW[c, i] = sum over tokens of g_t[c] x_(t-w+1+i)[c],   dbias = sum over tokens of g
//
//   attn::short_convolution_backward(x, {.weight = w}, d_out, {.x = dx, .weight = dw}, {.activation = f}, threads);
//   attn::short_convolution_backward(x, {.weight = w}, d_out, {.x = dx, .initial_state = ds, .d_final_state = after},
//                                    {.initial_state = s});
//
// Shapes   x, weights, options as the forward call's, d_out as its out; no results needed; gradients as their inputs.
// Cost     3 times the forward call's operations. Scratch: the weight, and per thread 6 w + 15 rows of C numbers.
// Throws   as the forward call, and for gradients of what was not given or in memory of an input or another gradient.
#pragma once

#include <attn/layers/detail/short_convolution_backward_run.hpp>
#include <attn/layers/short_convolution.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct short_convolution_gradients {
  view_field<S, 3> x{};
  view_field<S, 2> weight{};
  view_field<S, 1> bias{};
  view_field<S, 3> initial_state{};
  view_field<const S, 3> d_final_state{};   // an input, as final_state; 0 unless given
  bool accumulate = false;  // add to what is there instead of writing it over
};

template <viewable X, viewable D, class Weights = short_convolution_weights<element_of<const X&>>,
          class Options = short_convolution_options<element_of<const X&>>>
void short_convolution_backward(const X& x, const Weights& weights, const D& d_out,
                                const short_convolution_gradients<element_of<const X&>>& gradients,
                                Options&& options = {}, execution_ref exec = {}) {
  using S = element_of<const X&>;
  using T = compute_type<S>;
  const auto [from, d] = detail::inputs_of(x, d_out);
  const auto& w = detail::weights_of<short_convolution_weights<S>>(weights);
  const auto& given = detail::options_or_default<short_convolution_options<S>>(options);
  const auto& g = gradients;
  detail::layer_views check{"short_convolution_backward", from, d, detail::layer_views::backward_pass{}};
  const idx_t taps = detail::check_convolution(check, w.weight, w.bias, given.lengths);
  check.option("initial_state", given.initial_state);
  check.option("d_final_state", g.d_final_state);
  detail::check_convolution_state(check, "initial_state", given.initial_state, taps);
  detail::check_convolution_state(check, "d_final_state", g.d_final_state, taps);
  check.gradient("x", g.x, from);
  check.gradient("weight", g.weight, w.weight);
  check.gradient("bias", g.bias, w.bias);
  check.gradient("initial_state", g.initial_state, given.initial_state);

  const tensor_view<S, 2> d_weight = g.weight;
  detail::run_short_convolution_backward<T>(
      {.forward = detail::make_convolution<S>(from, w, given.activation, given.lengths, given.initial_state),
       .d = detail::input_tokens<T>(d), .d_final = tensor_view<const S, 3>(g.d_final_state),
       .dx = {tensor_view<S, 3>(g.x), g.accumulate}, .d_initial = {tensor_view<S, 3>(g.initial_state), g.accumulate},
       .d_weight = {detail::transposed(d_weight), g.accumulate}, .d_bias = {tensor_view<S, 1>(g.bias), g.accumulate}},
      detail::plain_execution_of("short_convolution_backward", exec, options));
}

}}  // namespace attn::ATTN_ISA
