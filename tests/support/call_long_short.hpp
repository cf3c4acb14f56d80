#pragma once
#include <attn/low_rank/long_short_backward.hpp>

#include "support/call.hpp"

namespace testing {

template <class S>
struct compiled_long_short {
  using options = attn::long_short_options<S>;
  using gradients = attn::long_short_gradients<S>;
  static void call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, in_view<S> logits, const options&,
                   attn::execution&);
  static void backward(in_view<S> q, in_view<S> k, in_view<S> v, in_view<S> out, in_view<S> logits, in_view<S> d_out,
                       const gradients&, const options&, attn::execution&);
};

}  // namespace testing
