#include "support/call_latent_attention.hpp"

namespace testing {

template <class S>
void compiled_latent_attention<S>::call(const latent_inputs<S>& x, out_view<S> out,
                                        const attn::latent_attention_options<S>& options, attn::execution& exec) {
  attn::latent_attention(x.q, x.q_rotary, x.latent, x.k_rotary, x.w_key, x.w_value, out, options, exec);
}

template <class S>
void compiled_latent_attention<S>::step(attn::kv_cache<S>& cache, const latent_inputs<S>& x, out_view<S> out,
                                        const attn::latent_attention_step_options<S>& options, attn::execution& exec) {
  attn::latent_attention_step(cache, x.q, x.q_rotary, x.latent, x.k_rotary, x.w_key, x.w_value, out, options, exec);
}

template <class S>
void compiled_latent_attention<S>::backward(const latent_inputs<S>& x, in_view<S> out, in_view<S> d_out,
                                            const attn::latent_attention_gradients<S>& gradients,
                                            const attn::latent_attention_options<S>& options, attn::execution& exec) {
  attn::latent_attention_backward(x.q, x.q_rotary, x.latent, x.k_rotary, x.w_key, x.w_value, out, d_out, gradients,
                                  options, exec);
}

ATTN_TEST_FOR_ALL_TYPES(compiled_latent_attention);

}  // namespace testing
