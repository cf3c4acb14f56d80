// attn: the gradients of aft_simple.
//
//   y_t = sum_t' p_tt' v_t'      p_tt' = e^(k_t') / sum e^(k)      dy_t = d_out_t sigma(q_t)
//   dq_t = d_out_t y_t sigma'(q_t)      dv_t' = sum_t p_tt' dy_t      dk_t' = sum_t p_tt' (v_t' - y_t) dy_t
//                                                                  Zhai et al. 2021, "An attention free transformer"
//
//   attn::aft_simple(q, k, v, out, {.causal = true}, threads);
//   attn::aft_simple_backward(q, k, v, d_out, {.q = dq, .k = dk, .v = dv}, {.causal = true}, threads);
//
// What the forward call wrote is not needed. k may be of any size, as for aft_simple: nothing overflows. Without a gate
// the gradient of q is 0.
//
// Shapes   q, k, v, the options: as the forward call's; d_out as out. Gradients have the shapes of what they are of.
// Cost     Two passes over memory: k, v, q and d_out, then k, v and the gradients (causal: k and v, then all).
//          Scratch: 4 D numbers for every 256 tokens (causal: 9 D); causal, up to 65536 numbers a thread.
// Throws   as the forward call, and for gradients in memory of an input or of another gradient.
#pragma once

#include <attn/aft/aft_simple.hpp>
#include <attn/aft/detail/aft_simple_backward_run.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct aft_simple_gradients {
  view_field<S> q{}, k{}, v{};
  bool accumulate = false;  // add to what is there instead of writing it over
};

template <viewable Q, viewable K, viewable V, viewable D, class Options = aft_simple_options<element_of<const Q&>>>
void aft_simple_backward(const Q& q, const K& k, const V& v, const D& d_out,
                         const aft_simple_gradients<element_of<const Q&>>& gradients, Options&& options = {},
                         execution_ref exec = {}) {
  using S = element_of<const Q&>;
  const auto call = detail::checked_aft_backward<aft_simple_options<S>>(
      "aft_simple_backward", q, k, v, tensor_view<const S>(), d_out,
      {gradients.q, gradients.k, gradients.v, gradients.accumulate}, options, exec);
  detail::run_aft_simple_backward<S>(call.x, call.exec);
}

}}  // namespace attn::ATTN_ISA
