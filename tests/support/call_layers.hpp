#pragma once
// The layers with every argument as a plain view and every callable behind std::function, compiled once for all tests.
#include <attn/layers/encoder_block.hpp>
#include <attn/layers/encoder_block_backward.hpp>
#include <attn/layers/group_norm.hpp>
#include <attn/layers/group_norm_backward.hpp>
#include <attn/layers/multi_head.hpp>
#include <attn/layers/multi_head_backward.hpp>
#include <attn/layers/packed_weights.hpp>
#include <attn/layers/reversible_block.hpp>
#include <attn/layers/reversible_block_backward.hpp>
#include <attn/layers/rms_norm.hpp>
#include <attn/layers/rms_norm_backward.hpp>
#include <attn/layers/short_convolution_backward.hpp>
#include <attn/layers/short_convolution_step.hpp>
#include <attn/layers/token_shift_backward.hpp>
#include <attn/layers/token_shift_step.hpp>

#include "support/call.hpp"

namespace testing {

template <class S>
using in_sequence = attn::tensor_view<const S, 3>;
template <class S>
using out_sequence = attn::tensor_view<S, 3>;
template <class S>
using in_matrix = attn::tensor_view<const S, 2>;
template <class S>
using in_vector = attn::tensor_view<const S, 1>;
template <class S>
using attention_of = std::function<void(in_view<S>, in_view<S>, in_view<S>, out_view<S>, attn::execution&)>;
template <class S>
using mixer_of = std::function<void(in_sequence<S>, out_sequence<S>, attn::execution&)>;

template <class S>
using attention_backward_of =
    std::function<void(in_view<S> q, in_view<S> k, in_view<S> v, in_view<S> out, in_view<S> d_out, out_view<S> dq,
                       out_view<S> dk, out_view<S> dv, attn::execution&)>;
template <class S>
using mixer_backward_of = std::function<void(in_sequence<S> x, in_sequence<S> out, in_sequence<S> d_out,
                                             out_sequence<S> dx, attn::execution&)>;

// Backward passes, compiled apart from the forward ones. S is one of all_types.
template <class S>
struct compiled_layers_backward {
  using execution = attn::execution;
  static void project_backward(in_sequence<S> x, const attn::project_weights<S>&, in_sequence<S> d_out,
                               const attn::project_gradients<S>&, execution&);
  static void layer_norm_backward(in_sequence<S> x, const attn::layer_norm_weights<S>&, in_sequence<S> d_out,
                                  const attn::layer_norm_gradients<S>&, const attn::layer_norm_options<S>&, execution&);
  static void rms_norm_backward(in_sequence<S> x, const attn::rms_norm_weights<S>&, in_sequence<S> d_out,
                                const attn::rms_norm_gradients<S>&, const attn::rms_norm_options<S>&, execution&);
  static void group_norm_backward(in_sequence<S> x, const attn::group_norm_weights<S>&, in_sequence<S> d_out,
                                  const attn::group_norm_gradients<S>&, const attn::group_norm_options<S>&, execution&);
  static void feed_forward_backward(in_sequence<S> x, const attn::feed_forward_weights<S>&, in_sequence<S> d_out,
                                    const attn::feed_forward_gradients<S>&, attn::activation, execution&);
  static void multi_head_backward(in_sequence<S> x, const attn::multi_head_weights<S>&, const attention_of<S>&,
                                  const attention_backward_of<S>&, in_sequence<S> d_out,
                                  const attn::multi_head_gradients<S>&, const attn::multi_head_options<S>&, execution&);
  static void encoder_block_backward(in_sequence<S> x, const attn::encoder_block_weights<S>&, const mixer_of<S>&,
                                     const mixer_backward_of<S>&, in_sequence<S> d_out,
                                     const attn::encoder_block_gradients<S>&, const attn::encoder_block_options<S>&,
                                     execution&);
  static void reversible_block_backward(in_sequence<S> out, out_sequence<S> x, const mixer_of<S>& f,
                                        const mixer_of<S>& g, const mixer_backward_of<S>& f_backward,
                                        const mixer_backward_of<S>& g_backward, in_sequence<S> d_out,
                                        const attn::reversible_block_gradients<S>&,
                                        const attn::reversible_block_options<S>&, execution&);
  static void short_convolution_backward(in_sequence<S> x, const attn::short_convolution_weights<S>&,
                                         in_sequence<S> d_out, const attn::short_convolution_gradients<S>&,
                                         const attn::short_convolution_options<S>&, execution&);
  static void token_shift_backward(in_sequence<S> x, const attn::token_shift_weights<S>&, in_sequence<S> d_out,
                                   const attn::token_shift_gradients<S>&, const attn::token_shift_options<S>&,
                                   execution&);
};

// S is one of all_types.
template <class S>
struct compiled_layers : compiled_layers_backward<S> {
  using execution = attn::execution;
  static void project(in_sequence<S> x, out_sequence<S> out, const attn::project_weights<S>&, execution&);
  static void layer_norm(in_sequence<S> x, out_sequence<S> out, const attn::layer_norm_weights<S>&,
                         const attn::layer_norm_options<S>&, execution&);
  static void rms_norm(in_sequence<S> x, out_sequence<S> out, const attn::rms_norm_weights<S>&,
                       const attn::rms_norm_options<S>&, execution&);
  static void group_norm(in_sequence<S> x, out_sequence<S> out, const attn::group_norm_weights<S>&,
                         const attn::group_norm_options<S>&, execution&);
  static void feed_forward(in_sequence<S> x, out_sequence<S> out, const attn::feed_forward_weights<S>&,
                           attn::activation, execution&);
  static void multi_head(in_sequence<S> x, out_sequence<S> out, const attn::multi_head_weights<S>&,
                         const attention_of<S>&, const attn::multi_head_options<S>&, execution&);
  static void encoder_block(in_sequence<S> x, out_sequence<S> out, const attn::encoder_block_weights<S>&,
                            const mixer_of<S>&, const attn::encoder_block_options<S>&, execution&);
  static void reversible_block(in_sequence<S> x, out_sequence<S> out, const mixer_of<S>& f, const mixer_of<S>& g,
                               const attn::reversible_block_options<S>&, execution&);
  static void reversible_block_inverse(in_sequence<S> y, out_sequence<S> out, const mixer_of<S>& f,
                                       const mixer_of<S>& g, const attn::reversible_block_options<S>&, execution&);
  static void short_convolution(in_sequence<S> x, out_sequence<S> out, const attn::short_convolution_weights<S>&,
                                const attn::short_convolution_options<S>&, execution&);
  static void short_convolution_step(attn::short_convolution_state<S>&, in_sequence<S> x, out_sequence<S> out,
                                     const attn::short_convolution_weights<S>&,
                                     const attn::short_convolution_step_options&, execution&);
  static void token_shift(in_sequence<S> x, out_sequence<S> out, const attn::token_shift_weights<S>&,
                          const attn::token_shift_options<S>&, execution&);
  static void token_shift_step(attn::token_shift_state<S>&, in_sequence<S> x, out_sequence<S> out,
                               const attn::token_shift_weights<S>&, const attn::token_shift_step_options&, execution&);
};

}  // namespace testing
