#pragma once
#include <attn/softmax/neighborhood_backward.hpp>

#include "support/call.hpp"

namespace testing {

template <class S>
struct compiled_neighborhood {
  using options = attn::neighborhood_options<S>;
  using gradients = attn::neighborhood_gradients<S>;
  static void call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, const options&, const score_of<S>&,
                   attn::execution&);
  static void backward(in_view<S> q, in_view<S> k, in_view<S> v, in_view<S> out, in_view<S> d_out, const gradients&,
                       const options&, const score_of<S>&, const score_backward_of<S>&, attn::execution&);
};

}  // namespace testing
