// attn: the gradients of aft_full.
//
//   y_t = sum_t' p_tt' v_t'      p_tt' = e^(k_t' + w_tt') / den_t      dy_t = d_out_t sigma(q_t)
//   dq_t = d_out_t y_t sigma'(q_t)      dv_t' = sum_t p_tt' dy_t      dk_t' = sum_t p_tt' (v_t' - y_t) dy_t
//   dw_tt' = sum of p_tt' (v_t' - y_t) dy_t over the channels and heads that share w
//                                                                  Zhai et al. 2021, "An attention free transformer"
//
//   attn::aft_full(q, k, v, out, w, {.causal = true}, threads);
//   attn::aft_full_backward(q, k, v, w, d_out, {.q = dq, .k = dk, .v = dv, .w = dw}, {.causal = true}, threads);
//
// What the forward call wrote is not needed. k and w may be up to 1e6 in size (double: 1e14): rows that the products
// would compute inaccurately are recomputed. For larger k and w the rounding error of k + w is in the exponents of the
// weights, and gradients may be wrong by any factor, or infinite; the same holds where d_out or v is beyond 1e10
// (double: 1e100). The rounding error of dk and dw is that of their terms p v dy and p y dy, which cancel where one key
// has nearly all the weight of a row. Without a gate the gradient of q is 0; that of a masked bias is 0.
//
// Shapes   q, k, v, w, the options: as the forward call's; d_out as out. Gradients have the shapes of what they are of;
//          that of w is summed over the heads that share it.
// Cost     Three times the forward call: its own work again, as much for k and v, as much for w. Rows that need
//          recomputation take several times as long, as in the forward call. Scratch: 7 L numbers a channel, of 512
//          channels at a time, 3 L of them touched only where rows need recomputation; about half a million numbers a
//          thread; L^2 numbers where w is shared by more than 512 channels, or by heads of different lengths.
// Throws   as the forward call, and for gradients in memory of an input or of another gradient.
#pragma once

#include <attn/aft/aft_full.hpp>
#include <attn/aft/detail/aft_window_backward_run.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct aft_full_gradients {
  view_field<S> q{}, k{}, v{}, w{};
  bool accumulate = false;  // add to what is there instead of writing it over
};

template <viewable Q, viewable K, viewable V, viewable W, viewable D,
          class Options = aft_full_options<element_of<const Q&>>>
void aft_full_backward(const Q& q, const K& k, const V& v, const W& w, const D& d_out,
                       const aft_full_gradients<element_of<const Q&>>& gradients, Options&& options = {},
                       execution_ref exec = {}) {
  using S = element_of<const Q&>;
  auto call = detail::checked_aft_backward<aft_full_options<S>>(
      "aft_full_backward", q, k, v, w, d_out,
      {gradients.q, gradients.k, gradients.v, gradients.accumulate, gradients.w, &detail::gradient_elements_of<S>},
      options, exec);
  const auto grid = detail::check_aft_full(call.views, call.x);
  detail::run_aft_window_backward(call.x, grid, call.exec);
}

}}  // namespace attn::ATTN_ISA
