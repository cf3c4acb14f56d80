// attn: the gradients of project.
//
//   dx = d_out W,   dW = sum over tokens of d_out^T x,   db = sum over tokens of d_out         (out = x W^T + b)
//
//   attn::project(x, out, {.weight = w, .bias = b}, threads);
//   attn::project_backward(x, {.weight = w, .bias = b}, d_out, {.x = dx, .weight = dw, .bias = db}, threads);
//
// Shapes   x and weights as the forward call's, d_out as its out, not needed; gradients as their inputs, per head too.
// Cost     2 B L n m operations for each of dx and dW. Scratch: packed, the weight, and 480 tokens of x and d_out (with
//          more than four threads as many again for every four); the sums of dW, n m numbers; per thread 96 (n + m)
//          numbers.
// Throws   std::invalid_argument for shapes that do not fit, and for gradients that share memory with an input or one
//          another, before anything is written.
//
// A token whose d_out is 0 adds nothing, whatever its x is: so padding, NaN or not, has no part in dW.
#pragma once

#include <attn/layers/detail/project_backward_run.hpp>
#include <attn/layers/project.hpp>

namespace attn { inline namespace ATTN_ISA {

/// A matrix, or a view [heads, m, n].
template <class S>
using project_weight_gradient = detail::field_per_head<view_field<S, 2>, S>;

/// The gradients of project_weights.
template <class S>
struct project_weight_gradients {
  view_field<S, 2> weight{};
  view_field<S, 1> bias{};
};

template <class S>
struct project_gradients {
  view_field<S, 3> x{};
  project_weight_gradient<S> weight{};
  view_field<S, 1> bias{};
  bool accumulate = false;  // add to what is there instead of writing it over
};

template <viewable X, viewable D, class Weights = project_weights<element_of<const X&>>>
void project_backward(const X& x, const Weights& weights, const D& d_out,
                      const project_gradients<element_of<const X&>>& gradients, execution_ref exec = {}) {
  using S = element_of<const X&>;
  const auto [from, d] = detail::inputs_of(x, d_out);
  detail::call_project_backward<S>(from, detail::weights_of<project_weights<S>>(weights), d, gradients,
                                   detail::plain_execution_of("project_backward", exec));
}

}}  // namespace attn::ATTN_ISA

#define ATTN_RUN(S) void call_project_backward<S>(const tensor_view<const S, 3>&, const project_weights<S>&,          \
  const tensor_view<const S, 3>&, const project_gradients<S>&, execution&)
#include <attn/core/detail/compiled.hpp>
