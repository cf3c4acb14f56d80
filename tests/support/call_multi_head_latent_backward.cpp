#include "support/call_multi_head_latent.hpp"

namespace testing {

template <class S>
void compiled_multi_head_latent_backward<S>::backward(in_sequence<S> x,
                                                      const attn::multi_head_latent_weights<S>& weights,
                                                      in_sequence<S> d_out,
                                                      const attn::multi_head_latent_gradients<S>& gradients,
                                                      const attn::multi_head_latent_options<S>& options,
                                                      attn::execution& exec) {
  attn::multi_head_latent_backward(x, weights, d_out, gradients, options, exec);
}

ATTN_TEST_FOR_ALL_TYPES(compiled_multi_head_latent_backward);

}  // namespace testing
