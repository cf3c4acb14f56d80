// attn: the gradients of pointwise.
//
//   attn::pointwise_backward(q, k, v, d_out, {.q = dq, .k = dk, .v = dv}, {.causal = true, .shift = -8}, threads);
//   attn::pointwise_backward(q, k, v, d_out, {.q = dq}, {}, f, f_derivative);             // with a function f(s)
//
// With s_ij and a_i as in pointwise.hpp, and dp_ij = d_out_i . v_j:
//   dv_j = sum_i a_i f(s_ij) d_out_i,  ds_ij = a_i f'(s_ij) dp_ij,  dq_i = scale sum_j ds'_ij k_j,
//   dk_j = scale sum_i ds'_ij q_i, ds' = ds times the derivative of softcap; dbias_ij = ds_ij, drelative_bias its
//   sums over the pairs of a distance, dalibi_slopes minus the sums of ds_ij |p_i - j|; drow_weights_i = weight times
//   the sum over heads and keys of f(s_ij) dp_ij. The derivative of relu at 0 is 0.
//
// Shapes   q, k, v, the options: as the forward call's; d_out as its out, which is not needed. Gradients have the
//          shapes of what they are of; those of keys and values are summed over the query heads of a group, those of
//          bias and row_weights over what these were broadcast over.
// Cost     2 B H (3 D + 2 Dv) operations for every visible key of a query. Scratch as in full_softmax_backward.hpp,
//          with a window too, and for drow_weights B H + 8 lists of Lq doubles.
// Throws   std::invalid_argument for shapes or options that do not fit, for gradients of what was not given or that
//          share memory with an input or one another, before anything is written.
//
// A row that sees no key has gradient 0. f_derivative(s) is the derivative of f, and is called as f is.
#pragma once

#include <attn/softmax/detail/pointwise_backward_run.hpp>
#include <attn/softmax/pointwise.hpp>

namespace attn { inline namespace ATTN_ISA {

/// The gradients pointwise_backward computes: those given. S is the element type of the call.
template <class S>
struct pointwise_gradients {
  using real = compute_type<S>;
  static constexpr unsigned shared = detail::fields::k | detail::fields::bias | detail::fields::relative_bias |
                                     detail::fields::alibi_slopes;

  view_field<S> q{}, k{}, v{};
  /// As in full_softmax_gradients; row_weights as the option, [B or 1, Lq].
  view_field<real> bias{};
  view_field<real, 2> relative_bias{}, row_weights{};
  view_field<real, 1> alibi_slopes{};
  bool accumulate = false;
};

/// The gradients of pointwise; options, f with its derivative, and execution may each be left out. See the top of the
/// file.
template <viewable Q, viewable K, viewable V, viewable D, class Options = pointwise_options<element_of<const Q&>>,
          class F = detail::no_function, class FDerivative = detail::no_function>
void pointwise_backward(const Q& q, const K& k, const V& v, const D& d_out,
                        const pointwise_gradients<element_of<const Q&>>& gradients, Options&& options = {},
                        F&& f = {}, FDerivative&& f_derivative = {}, execution_ref exec = {}) {
  using S = element_of<const Q&>;
  const auto& given = detail::options_or_default<pointwise_options<S>>(options);
  auto weights = detail::differentiable_function_of<S>(given, f, f_derivative);
  execution_ref threads(detail::execution_of(exec, options, f, f_derivative));
  detail::no_score_backward none;
  const auto x = as_view(q);
  const tensor_view<const S> out(nullptr, {x.extent(0), x.extent(1), x.extent(2), as_view(v).extent(3)});  // a shape
  auto call = detail::checked_backward_call<pointwise_options>("pointwise_backward", q, k, v, out, d_out, gradients,
                                                               given, weights, none, threads);
  detail::check_pointwise(call);
  call.views.at_least("right", 0, given.right);
  call.views.gradient("row_weights", gradients.row_weights, given.row_weights);
  detail::run_pointwise_backward(call, given.left, given.right, gradients.row_weights);
}

}}  // namespace attn::ATTN_ISA
