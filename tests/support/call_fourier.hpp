#pragma once
// The Fourier operators, as call.hpp has those of softmax.
#include <attn/fourier/fnet.hpp>
#include <attn/fourier/fnet_backward.hpp>

#include "support/call.hpp"

namespace testing {

template <class S>
struct compiled_fnet {
  using options = attn::fnet_options<S>;
  static void call(in_view<S> x, out_view<S> out, const options&, attn::execution&);
  static void backward(in_view<S> d_out, const attn::fnet_gradients<S>&, const options&, attn::execution&);
};

}  // namespace testing
