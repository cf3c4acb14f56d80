// attn: the block of a Transformer encoder, around anything that mixes tokens.
//
//   .norm_first = true    h = x + mix(norm_1(x)),   out = h + feed_forward(norm_2(h))    pre-norm: GPT-2, ViT
//   .norm_first = false   h = norm_1(x + mix(x)),   out = norm_2(h + feed_forward(h))    post-norm: Vaswani et al. 2017
//
//   const auto mix = [&](auto x, auto out, attn::execution& exec) {
//     attn::multi_head(x, out, attention, attend, {.heads = 8}, exec);
//   };
//   attn::encoder_block(x, out, {.feed_forward = {.up = u, .down = d}}, mix);
//   attn::encoder_block(x, out, weights, mix, {.norm_first = false}, threads);
//
// With .residual = {.weight = r, .bias = b} the first sum has x r^T + b in the place of x, and the width may change.
//
// Shapes   x and out [B, L, D], up [hidden, D], up_bias [hidden], down [D, hidden], down_bias [D], and gamma and beta
//          of each norm [D]; biases, gammas and betas may be left out. Out may be x: a stack of blocks then needs the
//          memory of one sequence. With a residual weight [D, n], x is [B, L, n], and so are what the mixer takes and,
//          before it, norm_1. float, double, or Eigen::half / Eigen::bfloat16 in memory with float sums.
// Mixer    mix(x, out, execution) is called once, with views [B, L, D]; multi_head as above, or fnet. It fills out.
// Cost     that of the mixer, and 4 B L D hidden operations. Scratch, beside the mixer's: two sequences like x, a third
//          with a residual weight, and the packed weights of the feed-forward layer.
// Throws   std::invalid_argument for shapes that do not fit, before anything is written; exceptions of the mixer are
//          passed on and leave out unchanged.
#pragma once

#include <attn/layers/detail/encoder_block_run.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct encoder_block_weights {
  layer_norm_weights<S> norm_1{}, norm_2{};
  feed_forward_weights<S> feed_forward{};
  project_weights<S> residual{};
};

template <class S>
struct encoder_block_options {
  bool norm_first = true;
  bool rms = false;  // whether the norms are rms_norm, without means, instead of layer_norm
  attn::activation activation = attn::activation::gelu;
  /// Added to the variances of the norms.
  compute_type<S> eps = compute_type<S>(1e-5);
  /// Written if given: the result of the mixer, [B, L, D]. encoder_block_backward reads it; without it, it calls the
  /// mixer once more.
  view_field<S, 3> mixed{};
};

template <viewable X, viewable O, class Mixer, class Weights = encoder_block_weights<element_of<const X&>>,
          class Options = encoder_block_options<element_of<const X&>>>
void encoder_block(const X& x, O&& out, const Weights& weights, Mixer&& mix, Options&& options = {},
                   execution_ref exec = {}) {
  using S = element_of<const X&>;
  static_assert(detail::token_mixer<std::remove_reference_t<Mixer>, S>,
                "attn: the mixer must be callable as mix(x, out, execution)");
  const auto [from, to] = detail::sequences_of(x, out);
  detail::call_encoder_block<S>(from, to, detail::weights_of<encoder_block_weights<S>>(weights),
                                detail::options_or_default<encoder_block_options<S>>(options),
                                [&mix](const auto& in, const auto& mixed, execution& e) { mix(in, mixed, e); },
                                detail::execution_of(exec, options));
}

}}  // namespace attn::ATTN_ISA

#define ATTN_RUN(S) void call_encoder_block<S>(const tensor_view<const S, 3>&, const tensor_view<S, 3>&,               \
  const encoder_block_weights<S>&, const encoder_block_options<S>&, const mixer_ref<S>&, execution&)
#include <attn/core/detail/compiled.hpp>
