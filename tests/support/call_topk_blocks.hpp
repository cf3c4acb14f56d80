#pragma once
#include <attn/softmax/topk_blocks_backward.hpp>
#include <attn/softmax/topk_blocks_step.hpp>

#include "support/call.hpp"

namespace testing {

template <class S>
struct compiled_topk_blocks {
  using options = attn::topk_blocks_options<S>;
  using gradients = attn::topk_blocks_gradients<S>;
  using step_options = attn::topk_blocks_step_options<S>;
  static void call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, const options&, const score_of<S>&,
                   attn::execution&);
  static void backward(in_view<S> q, in_view<S> k, in_view<S> v, in_view<S> out, in_view<S> d_out, const gradients&,
                       const options&, const score_of<S>&, const score_backward_of<S>&, attn::execution&);
  static void step(attn::topk_blocks_cache<S>&, in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out,
                   const step_options&, const score_of<S>&, attn::execution&);
};

}  // namespace testing
