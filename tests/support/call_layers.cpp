#include "support/call_layers.hpp"

namespace testing {

template <class S>
void compiled_layers<S>::project(in_sequence<S> x, out_sequence<S> out, const attn::project_weights<S>& weights,
                                 execution& exec) {
  attn::project(x, out, weights, exec);
}

template <class S>
void compiled_layers<S>::layer_norm(in_sequence<S> x, out_sequence<S> out, const attn::layer_norm_weights<S>& weights,
                                    const attn::layer_norm_options<S>& options, execution& exec) {
  attn::layer_norm(x, out, weights, options, exec);
}

template <class S>
void compiled_layers<S>::rms_norm(in_sequence<S> x, out_sequence<S> out, const attn::rms_norm_weights<S>& weights,
                                  const attn::rms_norm_options<S>& options, execution& exec) {
  attn::rms_norm(x, out, weights, options, exec);
}

template <class S>
void compiled_layers<S>::group_norm(in_sequence<S> x, out_sequence<S> out, const attn::group_norm_weights<S>& weights,
                                    const attn::group_norm_options<S>& options, execution& exec) {
  attn::group_norm(x, out, weights, options, exec);
}

template <class S>
void compiled_layers<S>::feed_forward(in_sequence<S> x, out_sequence<S> out,
                                      const attn::feed_forward_weights<S>& weights, attn::activation activation,
                                      execution& exec) {
  attn::feed_forward(x, out, weights, {.activation = activation}, exec);
}

template <class S>
void compiled_layers<S>::multi_head(in_sequence<S> x, out_sequence<S> out, const attn::multi_head_weights<S>& weights,
                                    const attention_of<S>& op, const attn::multi_head_options<S>& options,
                                    execution& exec) {
  attn::multi_head(x, out, weights, op, options, exec);
}

template <class S>
void compiled_layers<S>::encoder_block(in_sequence<S> x, out_sequence<S> out,
                                       const attn::encoder_block_weights<S>& weights, const mixer_of<S>& mix,
                                       const attn::encoder_block_options<S>& options, execution& exec) {
  attn::encoder_block(x, out, weights, mix, options, exec);
}

template <class S>
void compiled_layers<S>::reversible_block(in_sequence<S> x, out_sequence<S> out, const mixer_of<S>& f,
                                          const mixer_of<S>& g, const attn::reversible_block_options<S>& options,
                                          execution& exec) {
  attn::reversible_block(x, out, f, g, options, exec);
}

template <class S>
void compiled_layers<S>::reversible_block_inverse(in_sequence<S> y, out_sequence<S> out, const mixer_of<S>& f,
                                                  const mixer_of<S>& g,
                                                  const attn::reversible_block_options<S>& options, execution& exec) {
  attn::reversible_block_inverse(y, out, f, g, options, exec);
}

template <class S>
void compiled_layers<S>::short_convolution(in_sequence<S> x, out_sequence<S> out,
                                           const attn::short_convolution_weights<S>& weights,
                                           const attn::short_convolution_options<S>& options, execution& exec) {
  attn::short_convolution(x, out, weights, options, exec);
}

template <class S>
void compiled_layers<S>::short_convolution_step(attn::short_convolution_state<S>& state, in_sequence<S> x,
                                                out_sequence<S> out,
                                                const attn::short_convolution_weights<S>& weights,
                                                const attn::short_convolution_step_options& options, execution& exec) {
  attn::short_convolution_step(state, x, out, weights, options, exec);
}

template <class S>
void compiled_layers<S>::token_shift(in_sequence<S> x, out_sequence<S> out,
                                     const attn::token_shift_weights<S>& weights,
                                     const attn::token_shift_options<S>& options, execution& exec) {
  attn::token_shift(x, out, weights, options, exec);
}

template <class S>
void compiled_layers<S>::token_shift_step(attn::token_shift_state<S>& state, in_sequence<S> x, out_sequence<S> out,
                                          const attn::token_shift_weights<S>& weights,
                                          const attn::token_shift_step_options& options, execution& exec) {
  attn::token_shift_step(state, x, out, weights, options, exec);
}

ATTN_TEST_FOR_ALL_TYPES(compiled_layers);

}  // namespace testing
