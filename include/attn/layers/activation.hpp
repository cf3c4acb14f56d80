// attn: activation functions, between the two projections of a feed-forward layer.
//
//   relu       max(x, 0)
//   gelu       x Phi(x), Phi the normal distribution: x (1 + erf(x / sqrt 2)) / 2     Hendrycks & Gimpel 2016
//   gelu_tanh  its approximation x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, as in GPT-2
//   silu       x / (1 + e^-x), also called swish                                       Elfwing, Uchibe & Doya 2017
//   tanh       and sigmoid, 1 / (1 + e^-x)
//   identity   x: with a gate, the bilinear layer of Shazeer 2020
//
// Both forms of GELU keep their digits where x is far below 0 and the usual formulas cancel. NaN stays NaN.
#pragma once

#include <attn/core/tensor_view.hpp>

namespace attn { inline namespace ATTN_ISA {

enum class activation { relu, gelu, gelu_tanh, silu, tanh, sigmoid, identity };

/// Of the output gate of multi_head.
enum class gate_activation { sigmoid, silu };

}}  // namespace attn::ATTN_ISA
