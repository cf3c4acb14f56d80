#pragma once

#include <attn/aft/aft_conv.hpp>
#include <attn/aft/detail/aft_gradients.hpp>

namespace attn::inline ATTN_ISA {

/// The gradients aft_conv_backward computes: those given. S is the element type of the call.
template <class S>
struct aft_conv_gradients {
  tensor_view<S> q{}, k{}, v{}, w{};
  /// Add to what is there instead of writing it over.
  bool accumulate = false;
};

}  // namespace attn::inline ATTN_ISA
