#include "support/call_multi_head_latent.hpp"

namespace testing {

template <class S>
void compiled_multi_head_latent<S>::call(in_sequence<S> x, out_sequence<S> out,
                                         const attn::multi_head_latent_weights<S>& weights,
                                         const attn::multi_head_latent_options<S>& options, attn::execution& exec) {
  attn::multi_head_latent(x, out, weights, options, exec);
}

template <class S>
void compiled_multi_head_latent<S>::step(attn::kv_cache<S>& cache, in_sequence<S> x, out_sequence<S> out,
                                         const attn::multi_head_latent_weights<S>& weights,
                                         const attn::multi_head_latent_step_options<S>& options,
                                         attn::execution& exec) {
  attn::multi_head_latent_step(cache, x, out, weights, options, exec);
}

ATTN_TEST_FOR_ALL_TYPES(compiled_multi_head_latent);

}  // namespace testing
