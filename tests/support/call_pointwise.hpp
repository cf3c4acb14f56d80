#pragma once
#include <attn/softmax/pointwise_backward.hpp>
#include <attn/softmax/pointwise_step.hpp>

#include "support/call.hpp"

namespace testing {

// f(s) of the caller's, and its derivative; an empty one means none.
template <class S>
using function_of = std::function<real<S>(real<S>)>;

template <class S>
struct compiled_pointwise {
  using options = attn::pointwise_options<S>;
  using gradients = attn::pointwise_gradients<S>;
  static void call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, const options&, const function_of<S>&,
                   attn::execution&);
  // As others have it: `out` is not read.
  static void backward(in_view<S> q, in_view<S> k, in_view<S> v, in_view<S> out, in_view<S> d_out, const gradients&,
                       const options&, const function_of<S>&, const function_of<S>& derivative, attn::execution&);
  static void step(attn::kv_cache<S>&, in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out,
                   const attn::pointwise_step_options<S>&, attn::execution&);
};

}  // namespace testing
