// attn: an operator as a value, for models whose operator is chosen at run time.
//
//   attn::attend_function<float> attend = [](auto q, auto k, auto v, auto out, attn::execution& exec) {
//     attn::full_softmax(q, k, v, out, {.causal = true}, exec);
//   };
//   if (fast) attend = [](auto q, auto k, auto v, auto out, auto& exec) { attn::linear(q, k, v, out, exec); };
//   attn::multi_head(x, out, weights, attend, {.heads = 8}, threads);
//
// Made of any callable f(q, k, v, out, execution) with views [B, heads, L, dim]; a copy has a copy of the callable, and
// a call of one that is empty throws std::bad_function_call. What mixes the tokens of whole sequences, such as fnet,
// has no queries and keys: it stands in the place of multi_head, as a mix_function.
//
//   attn::mix_function<float> mix = [](auto x, auto out, attn::execution& exec) {
//     attn::fnet(attn::split_heads(x, 1), attn::split_heads(out, 1), exec);     // over the whole hidden dim
//   };
//   attn::encoder_block(x, x, weights, mix, {}, threads);
#pragma once

#include <attn/core/execution.hpp>

#include <functional>

namespace attn { inline namespace ATTN_ISA {

template <element S>
using attend_function = std::function<void(const tensor_view<const S>& q, const tensor_view<const S>& k,
                                           const tensor_view<const S>& v, const tensor_view<S>& out, execution&)>;

template <element S>
using mix_function = std::function<void(const tensor_view<const S, 3>& x, const tensor_view<S, 3>& out, execution&)>;

}}  // namespace attn::ATTN_ISA
