#include "support/call_layers.hpp"

namespace testing {

template <class S>
void compiled_layers<S>::project(in_sequence<S> x, in_matrix<S> w, out_sequence<S> out, in_vector<S> bias,
                                 execution& exec) {
  attn::project(x, w, out, {.bias = bias}, exec);
}

template <class S>
void compiled_layers<S>::layer_norm(in_sequence<S> x, out_sequence<S> out, const attn::layer_norm_options<S>& options,
                                    execution& exec) {
  attn::layer_norm(x, out, options, exec);
}

template <class S>
void compiled_layers<S>::feed_forward(in_sequence<S> x, out_sequence<S> out,
                                      const attn::feed_forward_weights<S>& weights, attn::activation f,
                                      execution& exec) {
  attn::feed_forward(x, out, weights, {.f = f}, exec);
}

template <class S>
void compiled_layers<S>::multi_head(in_sequence<S> x, in_sequence<S> y, out_sequence<S> out,
                                    const attn::multi_head_weights<S>& weights, const attention_of<S>& op,
                                    const attn::multi_head_options& options, execution& exec) {
  attn::multi_head(x, y, out, weights, op, options, exec);
}

template <class S>
void compiled_layers<S>::encoder_block(in_sequence<S> x, out_sequence<S> out, const mixer_of<S>& mix,
                                       const attn::encoder_block_weights<S>& weights,
                                       const attn::encoder_block_options<S>& options, execution& exec) {
  attn::encoder_block(x, out, mix, weights, options, exec);
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

template struct compiled_layers<float>;
template struct compiled_layers<Eigen::bfloat16>;
#if !defined(ATTN_TEST_FEW_TYPES)
template struct compiled_layers<double>;
template struct compiled_layers<Eigen::half>;
#endif

}  // namespace testing
