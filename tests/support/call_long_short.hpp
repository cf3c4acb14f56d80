#pragma once
#include <attn/low_rank/long_short.hpp>

#include "support/call.hpp"

namespace testing {

template <class S>
struct compiled_long_short {
  using options = attn::long_short_options<S>;
  static void call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, in_view<S> logits, const options&,
                   attn::execution&);
};

}  // namespace testing
