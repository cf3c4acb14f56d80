#pragma once
// multi_head_latent with every argument as a plain view, compiled once for all tests.
#include <attn/layers/multi_head_latent.hpp>
#include <attn/layers/multi_head_latent_backward.hpp>
#include <attn/layers/multi_head_latent_step.hpp>

#include "support/call_layers.hpp"

namespace testing {

// S is one of all_types.
template <class S>
struct compiled_multi_head_latent_backward {
  static void backward(in_sequence<S> x, const attn::multi_head_latent_weights<S>&, in_sequence<S> d_out,
                       const attn::multi_head_latent_gradients<S>&, const attn::multi_head_latent_options<S>&,
                       attn::execution&);
};

template <class S>
struct compiled_multi_head_latent : compiled_multi_head_latent_backward<S> {
  static void call(in_sequence<S> x, out_sequence<S> out, const attn::multi_head_latent_weights<S>&,
                   const attn::multi_head_latent_options<S>&, attn::execution&);
  static void step(attn::kv_cache<S>&, in_sequence<S> x, out_sequence<S> out,
                   const attn::multi_head_latent_weights<S>&, const attn::multi_head_latent_step_options<S>&,
                   attn::execution&);
};

}  // namespace testing
