// attn: the gradients of neighborhood.
//
//   attn::neighborhood(q, k, v, out, {.grid = {64, 64}, .kernel = {13, 13}, .lse = lse});
//   attn::neighborhood_backward(q, k, v, out, d_out, {.q = dq, .k = dk, .v = dv},
//                               {.grid = {64, 64}, .kernel = {13, 13}, .lse = lse});
//
// The formulas of full_softmax_backward.hpp, over the neighbours of neighborhood.hpp. Shapes, errors, lse and score
// functions as there; the gradient of relative_bias is summed over the batch, and over heads where one table serves
// all.
//
// Cost     2 (3 D + 2 Dv) operations for every neighbour of a query; without lse, one product more. Scratch, per key
//          head in progress: about Lk (3 D + 2 Dv) numbers, up to Lk (6 D + 5 Dv) for long sequences; with the gradient
//          of relative_bias up to 4 tables more; never Lq x Lk.
#pragma once

#include <attn/softmax/detail/neighborhood_backward_run.hpp>
#include <attn/softmax/neighborhood.hpp>

namespace attn { inline namespace ATTN_ISA {

/// The gradients neighborhood_backward computes: those given. S is the element type of the call.
template <class S>
struct neighborhood_gradients {
  using real = compute_type<S>;
  static constexpr unsigned shared = detail::fields::k | detail::fields::relative_bias;

  view_field<S> q{}, k{}, v{};
  /// As the option.
  view_field<real, 2> relative_bias{};
  /// As in softmax_gradients.
  view_field<real, 1> sinks{};
  view_field<const real, 3> d_lse{};
  bool accumulate = false;
};

/// The gradients of neighborhood. See the top of the file.
template <viewable Q, viewable K, viewable V, viewable O, viewable D,
          class Options = neighborhood_options<element_of<const Q&>>, class Score = detail::no_score,
          class ScoreBackward = detail::no_score_backward>
void neighborhood_backward(const Q& q, const K& k, const V& v, const O& out, const D& d_out,
                           const neighborhood_gradients<element_of<const Q&>>& gradients, Options&& options = {},
                           Score&& score = {}, ScoreBackward&& score_backward = {}, execution_ref exec = {}) {
  auto call = detail::checked_backward_call<neighborhood_options>("neighborhood_backward", q, k, v, out, d_out,
                                                                  gradients, options, score, score_backward, exec);
  detail::run_neighborhood_backward(call, detail::checked_grid(call.views, call.shape, call.options));
}

}}  // namespace attn::ATTN_ISA
