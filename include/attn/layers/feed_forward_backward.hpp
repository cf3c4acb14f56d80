// attn: the gradients of feed_forward.
//
//   with p = x U^T + a, h = f(p), g = (d_out V) f'(p)                                     (out = h V^T + b)
//   dx = g U,   dU = sum over tokens of g^T x,   da = sum of g,   dV = sum of d_out^T h,   db = sum of d_out
//   gated, with q = x G^T + c, h = f(q) * p: g = (d_out V) * f(q), s = (d_out V) * p * f'(q),
//   dx = g U + s G,   dG = sum over tokens of s^T x,   dc = sum of s
//
//   attn::feed_forward(x, out, weights, {.activation = f}, threads);
//   attn::feed_forward_backward(x, weights, d_out, {.x = dx, .up = du, .down = dv}, {.activation = f}, threads);
//
// Shapes   x, weights and options as the forward call's, d_out as its out, not needed; gradients as what they are of.
// Cost     B L hidden (6 n + 4 m) operations, with a gate B L hidden (12 n + 4 m), 2.5 times those of
//          the forward pass: the hidden layer is computed again, 480 tokens at a time, never that of the whole
//          sequence. Scratch: packed, the weights and the transpose of up; the sums of dU and dV; n + m + 2 hidden
//          numbers for each of 480 tokens, with more than four threads as many again for every four.
// Throws   as the forward call, and for gradients of what was not given or in memory of an input or another gradient.
//
// A token whose d_out is 0 has gradient 0 and adds nothing, whatever its x is: so has padding, NaN or not. relu' is 0
// at 0.
#pragma once

#include <attn/layers/detail/feed_forward_backward_run.hpp>
#include <attn/layers/feed_forward.hpp>

namespace attn { inline namespace ATTN_ISA {

/// The gradients of feed_forward_weights.
template <class S>
struct feed_forward_weight_gradients {
  view_field<S, 2> up{}, down{}, gate{};
  view_field<S, 1> up_bias{}, down_bias{}, gate_bias{};
};

template <class S>
struct feed_forward_gradients {
  view_field<S, 3> x{};
  view_field<S, 2> up{}, down{}, gate{};
  view_field<S, 1> up_bias{}, down_bias{}, gate_bias{};
  bool accumulate = false;  // add to what is there instead of writing it over
};

template <viewable X, viewable D, class Weights = feed_forward_weights<element_of<const X&>>,
          class Options = feed_forward_options>
void feed_forward_backward(const X& x, const Weights& weights, const D& d_out,
                           const feed_forward_gradients<element_of<const X&>>& gradients, Options&& options = {},
                           execution_ref exec = {}) {
  using S = element_of<const X&>;
  using T = compute_type<S>;
  const auto [from, d] = detail::inputs_of(x, d_out);
  const auto& w = detail::weights_of<feed_forward_weights<S>>(weights);
  const auto& given = detail::options_or_default<feed_forward_options>(options);
  detail::layer_views check{"feed_forward_backward", from, d, detail::layer_views::backward_pass{}};
  check.gradient("x", gradients.x, from);
  check.gradient("up", gradients.up, w.up, "up weight");
  check.gradient("down", gradients.down, w.down, "down weight");
  check.gradient("up_bias", gradients.up_bias, w.up_bias, "up bias");
  check.gradient("down_bias", gradients.down_bias, w.down_bias, "down bias");
  check.gradient("gate", gradients.gate, w.gate, "gate weight");
  check.gradient("gate_bias", gradients.gate_bias, w.gate_bias, "gate bias");
  check.out_dim(d.extent(2));
  detail::check_feed_forward(check, w, from.extent(2));

  const feed_forward_weight_gradients<S> of_weights{gradients.up,      gradients.down,      gradients.gate,
                                                    gradients.up_bias, gradients.down_bias, gradients.gate_bias};
  using P = detail::product_type<S>;
  const detail::feed_forward_backward_memory<P> memory(w, of_weights, gradients.accumulate);
  detail::run_feed_forward_backward<P>({detail::input_tokens<T>(from),
                                        detail::input_tokens<T>(d),
                                        {gradients.x, gradients.accumulate},
                                        memory,
                                        given.activation},
                                       detail::plain_execution_of("feed_forward_backward", exec, options));
}

}}  // namespace attn::ATTN_ISA

#define ATTN_RUN(S) void run_feed_forward_backward(const feed_forward_backward_driver<product_type<S>>&, execution&)
#include <attn/core/detail/compiled.hpp>
