#include "support/call_layers.hpp"

namespace testing {

template <class S>
void compiled_layers_backward<S>::project_backward(in_sequence<S> x, const attn::project_weights<S>& weights,
                                                   in_sequence<S> d_out, const attn::project_gradients<S>& gradients,
                                                   execution& exec) {
  attn::project_backward(x, weights, d_out, gradients, exec);
}

template <class S>
void compiled_layers_backward<S>::layer_norm_backward(in_sequence<S> x, const attn::layer_norm_weights<S>& weights,
                                                      in_sequence<S> d_out,
                                                      const attn::layer_norm_gradients<S>& gradients,
                                                      const attn::layer_norm_options<S>& options, execution& exec) {
  attn::layer_norm_backward(x, weights, d_out, gradients, options, exec);
}

template <class S>
void compiled_layers_backward<S>::rms_norm_backward(in_sequence<S> x, const attn::rms_norm_weights<S>& weights,
                                                    in_sequence<S> d_out, const attn::rms_norm_gradients<S>& gradients,
                                                    const attn::rms_norm_options<S>& options, execution& exec) {
  attn::rms_norm_backward(x, weights, d_out, gradients, options, exec);
}

template <class S>
void compiled_layers_backward<S>::group_norm_backward(in_sequence<S> x, const attn::group_norm_weights<S>& weights,
                                                      in_sequence<S> d_out,
                                                      const attn::group_norm_gradients<S>& gradients,
                                                      const attn::group_norm_options<S>& options, execution& exec) {
  attn::group_norm_backward(x, weights, d_out, gradients, options, exec);
}

template <class S>
void compiled_layers_backward<S>::feed_forward_backward(in_sequence<S> x, const attn::feed_forward_weights<S>& weights,
                                                        in_sequence<S> d_out,
                                                        const attn::feed_forward_gradients<S>& gradients,
                                                        attn::activation activation, execution& exec) {
  attn::feed_forward_backward(x, weights, d_out, gradients, {.activation = activation}, exec);
}

template <class S>
void compiled_layers_backward<S>::multi_head_backward(in_sequence<S> x, const attn::multi_head_weights<S>& weights,
                                                      const attention_of<S>& op,
                                                      const attention_backward_of<S>& op_backward, in_sequence<S> d_out,
                                                      const attn::multi_head_gradients<S>& gradients,
                                                      const attn::multi_head_options<S>& options, execution& exec) {
  attn::multi_head_backward(x, weights, op, op_backward, d_out, gradients, options, exec);
}

template <class S>
void compiled_layers_backward<S>::encoder_block_backward(
    in_sequence<S> x, const attn::encoder_block_weights<S>& weights, const mixer_of<S>& mix,
    const mixer_backward_of<S>& mix_backward, in_sequence<S> d_out, const attn::encoder_block_gradients<S>& gradients,
    const attn::encoder_block_options<S>& options, execution& exec) {
  attn::encoder_block_backward(x, weights, mix, mix_backward, d_out, gradients, options, exec);
}

template <class S>
void compiled_layers_backward<S>::reversible_block_backward(
    in_sequence<S> out, out_sequence<S> x, const mixer_of<S>& f, const mixer_of<S>& g,
    const mixer_backward_of<S>& f_backward, const mixer_backward_of<S>& g_backward, in_sequence<S> d_out,
    const attn::reversible_block_gradients<S>& gradients, const attn::reversible_block_options<S>& options,
    execution& exec) {
  attn::reversible_block_backward(out, x, f, g, f_backward, g_backward, d_out, gradients, options, exec);
}

template <class S>
void compiled_layers_backward<S>::short_convolution_backward(
    in_sequence<S> x, const attn::short_convolution_weights<S>& weights, in_sequence<S> d_out,
    const attn::short_convolution_gradients<S>& gradients, const attn::short_convolution_options<S>& options,
    execution& exec) {
  attn::short_convolution_backward(x, weights, d_out, gradients, options, exec);
}

template <class S>
void compiled_layers_backward<S>::token_shift_backward(in_sequence<S> x, const attn::token_shift_weights<S>& weights,
                                                       in_sequence<S> d_out,
                                                       const attn::token_shift_gradients<S>& gradients,
                                                       const attn::token_shift_options<S>& options, execution& exec) {
  attn::token_shift_backward(x, weights, d_out, gradients, options, exec);
}

ATTN_TEST_FOR_ALL_TYPES(compiled_layers_backward);

}  // namespace testing
