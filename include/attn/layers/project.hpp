// attn: the linear layer.
//
//   out = x W^T + b
//
//   attn::project(x, out, {.weight = w});           // Eigen matrices: x [length, n], w [m, n], out [length, m]
//   attn::project(x, out, {.weight = w, .bias = b}, threads);
//   attn::project(x, out, {.weight = of_heads});    // a view [heads, m, n]: every head of x by its own matrix
//
// Shapes   x [B, L, n], weight [m, n] (a row for every output, as PyTorch keeps it; the [n, m] of TensorFlow, Flax and
//          GPT-2 as a transposed view, as fast: .weight = w.transpose(); or packed_weights.hpp), bias [m], which may be
//          left out, out [B, L, m]. float, double, or Eigen::half / Eigen::bfloat16 in memory with float sums. One
//          weight for each head (RWKV, xLSTM; block-diagonal): [heads, m, n], x [B, L, heads n], bias [heads m], out
//          [B, L, heads m]; each head gives what its matrix alone gives.
// Cost     2 B L n m operations, for every head. Scratch: the packed weight, about n m numbers, unless it was packed
//          before, and 48 (n + m) numbers per thread. With L up to eight, as in decoding, a weight with rows or columns
//          of stride 1 is read in place, and with B L up to 48 any is packed 64 outputs at a time: scratch is then 96 n
//          numbers at most and 40000 per thread, and threads share the outputs; or the heads, where there are as many.
//          In place a batch of many short sequences is multiplied at .5 to .6 of the peak, since each gets the numbers
//          it gets alone; packed weights, or the tokens of all items as one sequence [1, B L, n], reach the rate of
//          many tokens. Packed weights are of one matrix, not of heads.
// Throws   std::invalid_argument for shapes that do not fit, before anything is written.
//
// Every number of out is one sum whose order depends on L, n and the weight's storage only, not on other rows. Eigen's
// products do not guarantee this, and may allocate memory; the products here are as fast with Clang 14 (0.82 of a
// core's peak) and 1.3 to 1.6 times as fast with GCC 12 (512 x 512 weights, 4096 tokens, AVX-512).
#pragma once

#include <attn/layers/detail/field_per_head.hpp>
#include <attn/layers/detail/project_run.hpp>

namespace attn { inline namespace ATTN_ISA {

/// A matrix [m, n], packed or not, or a view [heads, m, n].
template <class S>
using project_weight = detail::field_per_head<weight_field<S>, const S>;

template <class S>
struct project_weights {
  project_weight<S> weight{};
  view_field<const S, 1> bias{};
};

template <viewable X, viewable O, class Weights = project_weights<element_of<const X&>>>
void project(const X& x, O&& out, const Weights& weights, execution_ref exec = {}) {
  using S = element_of<const X&>;
  const auto [from, to] = detail::sequences_of(x, out);
  detail::call_project<S>(from, to, detail::weights_of<project_weights<S>>(weights), exec.get());
}

}}  // namespace attn::ATTN_ISA

#define ATTN_RUN(S) void call_project<S>(const tensor_view<const S, 3>&, const tensor_view<S, 3>&,                     \
  const project_weights<S>&, execution&)
#include <attn/core/detail/compiled.hpp>
