// attn: the gradients of aft_local.
//
//   dq, dk and dv as in aft_full_backward.hpp, and p, y and dy as there
//   dw_tt' = sum of p_tt' (v_t' - y_t) dy_t over the channels and heads that share w, where |t - t'| < s; else 0
//                                                                  Zhai et al. 2021, "An attention free transformer"
//
//   attn::aft_local(q, k, v, out, w, {.window = 128, .band = true}, threads);
//   attn::aft_local_backward(q, k, v, w, d_out, {.q = dq, .k = dk, .v = dv, .w = dw}, {.window = 128, .band = true},
//                            threads);
//
// What the forward call wrote is not needed. Sizes of k, w, v and d_out: see aft_full_backward.hpp. Without a gate the
// gradient of q is 0; that of a masked bias is 0.
//
// Shapes   q, k, v, w, the options: as the forward call's; d_out as out. Gradients have the shapes of what they are of;
//          that of w, [L, L] or a band as w is, is summed over the heads that share it.
// Cost     Three times the forward call: its own work again, as much for k and v, as much for w. Scratch: that of the
//          forward call, 5 L numbers a channel, of 512 channels at a time, 3 L of them touched only where rows need
//          recomputation; as many numbers as w has where it is shared by more than 512 channels, or by heads of
//          different lengths.
// Throws   as the forward call, and for gradients in memory of an input or of another gradient.
#pragma once

#include <attn/aft/aft_local.hpp>
#include <attn/aft/detail/aft_window_backward_run.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct aft_local_gradients {
  view_field<S> q{}, k{}, v{}, w{};
  bool accumulate = false;  // add to what is there instead of writing it over
};

template <viewable Q, viewable K, viewable V, viewable W, viewable D,
          class Options = aft_local_options<element_of<const Q&>>>
void aft_local_backward(const Q& q, const K& k, const V& v, const W& w, const D& d_out,
                        const aft_local_gradients<element_of<const Q&>>& gradients, Options&& options = {},
                        execution_ref exec = {}) {
  using S = element_of<const Q&>;
  const auto& given = detail::options_or_default<aft_local_options<S>>(options);
  auto call = detail::checked_aft_backward<aft_local_options<S>>(
      "aft_local_backward", q, k, v, w, d_out,
      {gradients.q, gradients.k, gradients.v, gradients.accumulate, gradients.w, &detail::gradient_elements_of<S>},
      options, exec);
  const auto grid = detail::check_aft_local(call.views, call.x, given.window, given.band);
  detail::run_aft_window_backward(call.x, grid, call.exec);
}

}}  // namespace attn::ATTN_ISA
