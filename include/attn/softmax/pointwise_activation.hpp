// attn: the functions of pointwise.
#pragma once

#include <attn/core/tensor_view.hpp>

namespace attn { inline namespace ATTN_ISA {

/// What makes weights of scores s: sigmoid 1 / (1 + e^-s), silu s / (1 + e^-s), relu max(s, 0), squared_relu the
/// square of that.
enum class pointwise_activation { sigmoid, silu, relu, squared_relu };

}}  // namespace attn::ATTN_ISA
