#pragma once
// latent_attention, its step and its backward pass, compiled once for all tests.
#include <attn/layers/latent_attention_backward.hpp>
#include <attn/layers/latent_attention_step.hpp>

#include "support/call.hpp"

namespace testing {

// What every call reads; weights are [H, rows, r].
template <class S>
struct latent_inputs {
  in_view<S> q, q_rotary, latent, k_rotary;
  attn::tensor_view<const S, 3> w_key, w_value;
};

// S is one of all_types.
template <class S>
struct compiled_latent_attention {
  static void call(const latent_inputs<S>&, out_view<S> out, const attn::latent_attention_options<S>&,
                   attn::execution&);
  static void step(attn::kv_cache<S>&, const latent_inputs<S>&, out_view<S> out,
                   const attn::latent_attention_step_options<S>&, attn::execution&);
  static void backward(const latent_inputs<S>&, in_view<S> out, in_view<S> d_out,
                       const attn::latent_attention_gradients<S>&, const attn::latent_attention_options<S>&,
                       attn::execution&);
};

}  // namespace testing
