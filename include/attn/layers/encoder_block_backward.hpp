// attn: the gradients of encoder_block.
//
//   const auto mix_backward = [&](auto x, auto out, auto d_out, auto dx, attn::execution& exec) {
//     attn::multi_head_backward(x, heads, attend, attend_backward, d_out, {.x = dx, .query = dwq}, {.heads = 8}, exec);
//   };
//   attn::encoder_block(x, out, weights, mix, {}, threads);
//   attn::encoder_block_backward(x, weights, mix, mix_backward, d_out,
//                                {.x = dx, .norm_1 = {.gamma = dg}, .feed_forward = {.up = du}}, {}, threads);
//   const auto fourier_backward = [](auto, auto, auto d_out, auto dx, attn::execution& exec) {
//     attn::fnet_backward(attn::split_heads(d_out, 1), {.x = attn::split_heads(dx, 1)}, exec);
//   };
//
// Shapes   x, weights and options as the forward call's, d_out as its out, which is not needed; gradients have the
//          shapes of what they are of. dx may be d_out unless it is added to: a stack needs one sequence of gradients.
// Mixer    mix(x, out, execution) is called once more, unless options.mixed is given, which the forward call wrote.
//          Then mix_backward(x, out, d_out, dx, execution), with views [B, L, D], out being the mixer's result for x,
//          must overwrite dx. It also computes the gradients of the mixer's own weights, which encoder_block_backward
//          does not know.
// Cost     that of the mixer (without options.mixed) and of its backward pass, and 10 B L D hidden operations, 2.5
//          times those of the forward pass, or 14 where the norms come after: the feed-forward layer is computed again.
//          Scratch, beside theirs: five sequences like x, one less with options.mixed, two more with a residual weight,
//          and what feed_forward_backward needs; for 16-bit elements two to four of the sequences are of floats.
// Throws   std::invalid_argument for shapes that do not fit, and for gradients of what was not given or that share
//          memory with an input or one another, before anything is written; exceptions of the mixers are passed on and
//          leave dx unchanged.
#pragma once

#include <attn/layers/detail/encoder_block_backward_run.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct encoder_block_gradients {
  view_field<S, 3> x{};
  layer_norm_weight_gradients<S> norm_1{}, norm_2{};
  feed_forward_weight_gradients<S> feed_forward{};
  project_weight_gradients<S> residual{};
  bool accumulate = false;  // add to what is there instead of writing it over
};

template <viewable X, class Mixer, class MixerBackward, viewable D,
          class Weights = encoder_block_weights<element_of<const X&>>,
          class Options = encoder_block_options<element_of<const X&>>>
void encoder_block_backward(const X& x, const Weights& weights, Mixer&& mix, MixerBackward&& mix_backward,
                            const D& d_out, const encoder_block_gradients<element_of<const X&>>& gradients,
                            Options&& options = {}, execution_ref exec = {}) {
  using S = element_of<const X&>;
  static_assert(detail::token_mixer<std::remove_reference_t<Mixer>, S>,
                "attn: the mixer must be callable as mix(x, out, execution)");
  static_assert(detail::token_mixer_backward<std::remove_reference_t<MixerBackward>, S>,
                "attn: the mixer's gradient must be callable as mix_backward(x, out, d_out, dx, execution)");
  const auto [from, d] = detail::inputs_of(x, d_out);
  const auto& w = detail::weights_of<encoder_block_weights<S>>(weights);
  const auto& given = detail::options_or_default<encoder_block_options<S>>(options);
  detail::call_encoder_block_backward<S>(
      from, w, [&mix](const auto& in, const auto& mixed, execution& e) { mix(in, mixed, e); },
      [&mix_backward](const auto& in, const auto& mixed, const auto& d_mixed, const auto& dx, execution& e) {
        mix_backward(in, mixed, d_mixed, dx, e);
      },
      d, gradients, given, detail::plain_execution_of("encoder_block_backward", exec, options));
}

}}  // namespace attn::ATTN_ISA

#define ATTN_RUN(S) void call_encoder_block_backward<S>(const tensor_view<const S, 3>&,                                \
  const encoder_block_weights<S>&, const mixer_ref<S>&, const mixer_backward_ref<S>&, const tensor_view<const S, 3>&,  \
  const encoder_block_gradients<S>&, const encoder_block_options<S>&, execution&)
#include <attn/core/detail/compiled.hpp>
