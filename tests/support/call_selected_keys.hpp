#pragma once
#include <attn/core/paged_cache.hpp>
#include <attn/softmax/selected_keys_backward.hpp>
#include <attn/softmax/selected_keys_step.hpp>

#include "support/call.hpp"

namespace testing {

// The lists among the options.
template <class Options>
struct with_lists : Options {
  attn::index_view indices{};
};

template <class S>
struct compiled_selected_keys {
  using options = with_lists<attn::selected_keys_options<S>>;
  using gradients = attn::selected_keys_gradients<S>;
  using step_options = with_lists<attn::selected_keys_step_options<S>>;
  static void call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, const options&, const score_of<S>&,
                   attn::execution&);
  static void backward(in_view<S> q, in_view<S> k, in_view<S> v, in_view<S> out, in_view<S> d_out, const gradients&,
                       const options&, const score_of<S>&, const score_backward_of<S>&, attn::execution&);
  static void step(attn::kv_cache<S>&, in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, const step_options&,
                   const score_of<S>&, attn::execution&);
  using cached_options = with_lists<attn::selected_keys_cached_options<S>>;
  static void cached(const attn::kv_cache<S>&, in_view<S> q, out_view<S> out, const cached_options&, attn::execution&);
};

}  // namespace testing
