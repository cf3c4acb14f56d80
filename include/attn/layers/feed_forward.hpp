// attn: the feed-forward layer of a Transformer.
//
//   out = f(x U^T + a) V^T + b                        Vaswani et al. 2017, with f = GELU, its tanh form, ReLU or SiLU
//   out = (f(x G^T + c) * (x U^T + a)) V^T + b        gated, Shazeer 2020: SwiGLU with f = SiLU, GEGLU with GELU
//
//   attn::feed_forward(x, out, {.up = u, .down = v, .up_bias = a, .down_bias = b});
//   attn::feed_forward(x, out, {.up = u, .down = v, .gate = g}, {.activation = attn::activation::silu});
//   attn::feed_forward(x, out, weights, {.activation = attn::activation::relu}, threads);
//
// Shapes   x [B, L, n], up and gate [hidden, n], their biases [hidden], down [m, hidden], down_bias [m], out [B, L, m];
//          gate and biases may be left out, and out may be x. float, double, or Eigen::half / Eigen::bfloat16 in memory
//          with float sums; the hidden numbers of bf16 are rounded to bf16 where the processor multiplies those.
// Cost     2 B L hidden (n + m) operations, with a gate 2 B L hidden (2 n + m). Scratch: the packed weights, about
//          hidden (n + m) numbers, and 48 tokens per thread, with 512 hidden numbers each: never the hidden layer of
//          the whole sequence. With L up to eight, as in decoding, or B L up to 48, as in project.hpp, scratch is 48
//          tokens at most, with all their hidden numbers, and threads share the hidden numbers and the outputs.
// Throws   std::invalid_argument for shapes that do not fit, before anything is written.
#pragma once

#include <attn/layers/detail/feed_forward_run.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct feed_forward_weights {
  weight_field<S> up{}, down{}, gate{};
  view_field<const S, 1> up_bias{}, down_bias{}, gate_bias{};
};

struct feed_forward_options {
  attn::activation activation = attn::activation::gelu;
};

template <viewable X, viewable O, class Weights = feed_forward_weights<element_of<const X&>>,
          class Options = feed_forward_options>
void feed_forward(const X& x, O&& out, const Weights& weights, Options&& options = {}, execution_ref exec = {}) {
  using S = element_of<const X&>;
  const auto [from, to] = detail::sequences_of(x, out);
  detail::call_feed_forward<S>(from, to, detail::weights_of<feed_forward_weights<S>>(weights),
                               detail::options_or_default<feed_forward_options>(options).activation,
                               detail::execution_of(exec, options));
}

}}  // namespace attn::ATTN_ISA

#define ATTN_RUN(S) void call_feed_forward<S>(const tensor_view<const S, 3>&, const tensor_view<S, 3>&,                \
  const feed_forward_weights<S>&, activation, execution&)
#include <attn/core/detail/compiled.hpp>
