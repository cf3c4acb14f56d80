#pragma once
#include <attn/low_rank/multipole_backward.hpp>
#include <attn/low_rank/multipole_step.hpp>

#include "support/call.hpp"

namespace testing {

template <class S>
struct compiled_multipole {
  using options = attn::multipole_options<S>;
  using step_options = attn::multipole_step_options<S>;
  static void call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, const options&, attn::execution&);
  using gradients = attn::multipole_gradients<S>;
  static void backward(in_view<S> q, in_view<S> k, in_view<S> v, in_view<S> out, in_view<S> d_out, const gradients&,
                       const options&, attn::execution&);
  static void step(attn::multipole_cache<S>&, in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out,
                   const step_options&, attn::execution&);
};

}  // namespace testing
