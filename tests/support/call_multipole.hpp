#pragma once
#include <attn/low_rank/multipole.hpp>

#include "support/call.hpp"

namespace testing {

template <class S>
struct compiled_multipole {
  using options = attn::multipole_options<S>;
  static void call(in_view<S> q, in_view<S> k, in_view<S> v, out_view<S> out, const options&, attn::execution&);
};

}  // namespace testing
