// attn: the random features that performer has.
#pragma once

#include <attn/core/tensor_view.hpp>

namespace attn { inline namespace ATTN_ISA {

/// What the features are made of; x~ = x sqrt(scale), m features W.
enum class performer_kernel {
  positive,       // m^-1/2 exp(W x~ - |x~|^2 / 2)
  hyperbolic,     // (2m)^-1/2 exp(+-W x~ - |x~|^2 / 2)
  trigonometric,  // m^-1/2 exp(|x~|^2 / 2) [sin W x~, cos W x~]
  relu,           // max(W x~, 0) + feature_eps
};

}}  // namespace attn::ATTN_ISA
