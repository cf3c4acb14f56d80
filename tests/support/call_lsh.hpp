#pragma once
#include <attn/softmax/lsh.hpp>

#include "support/call.hpp"

namespace testing {

template <class S>
struct compiled_lsh {
  using options = attn::lsh_options<S>;
  static void call(in_view<S> q, in_view<S> v, out_view<S> out, const options&, const score_of<S>&, attn::execution&);
};

}  // namespace testing
