// attn: the gradients of multi_head, around any operator that has a backward pass.
//
//   d_heads = d_out W_o,   (dq, dk, dv) = op_backward(d_heads),   dx = dq W_q,   dy = dk W_k + dv W_v,
//   dW_q = sum over tokens of dq^T x, and so on;  dx is the sum of all three where y is x
//   through a rotation and a norm of q or k, where there are, as in rotary_backward and rms_norm_backward
//   with a gate g: d_gated = d_out W_o, d_heads = d_gated * f(g), dg = d_gated * heads * f'(g), dx gets dg W_g too
//
//   const auto attend = [&](auto q, auto k, auto v, auto out, attn::execution& exec) {
//     attn::full_softmax(q, k, v, out, {.causal = true, .lse = lse}, exec);              // lse: one buffer for both
//   };
//   const auto attend_backward = [&](auto q, auto k, auto v, auto out, auto d_out, auto dq, auto dk, auto dv,
//                                    attn::execution& exec) {
//     attn::full_softmax_backward(q, k, v, out, d_out, {dq, dk, dv}, {.causal = true, .lse = lse}, exec);
//   };
//   attn::multi_head(x, out, weights, attend, {.heads = 8});
//   attn::multi_head_backward(x, weights, attend, attend_backward, d_out, {.x = dx, .query = dwq}, {.heads = 8});
//
// Shapes   x, weights and options as the forward call's, d_out as its out, which is not needed; gradients have the
//          shapes of what they are of. A context is a separate input, even where it is x: its gradient is .context.
// Operator q, k, v are projected again, and op(q, k, v, out, execution) is called once more: an lse that it writes is
//          then that of this layer, whatever other layers wrote there. With options.attended, which the forward call
//          wrote, it is not called, and lse must be kept as well; without an output and a gate weight the forward
//          call's out serves as attended. Then op_backward(q, k, v, out, d_out, dq, dk, dv, execution) writes dq, dk
//          and dv over, with views [B, heads, L, dim] as in the forward call. Without key and value weights both are
//          given null views for k, v, dk and dv, or called as op(q, out, execution) and
//          op_backward(q, out, d_out, dq, execution); what they compute for their own keys is theirs.
// Cost     three times that of the forward call for the projections of q, k and v, twice for that of the output, and
//          the operator (without options.attended) and its backward pass. Scratch, beside the operator's: q, k, v, the
//          heads' output and the gradients of these, twice what the forward call needs, and what project_backward.hpp
//          needs.
// Throws   std::invalid_argument for shapes that do not fit, and for gradients of what was not given or that share
//          memory with an input or one another, before anything is written; exceptions of the operator are passed on.
//
// Tokens whose dq, dk and dv are 0, as an operator with true lengths leaves them in padding, have gradient 0 and add
// nothing, whatever their x is.
#pragma once

#include <attn/layers/detail/multi_head_backward_run.hpp>
#include <attn/layers/multi_head.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct multi_head_gradients {
  view_field<S, 3> x{}, context{};
  view_field<S, 2> query{}, key{}, value{}, output{}, gate{};
  view_field<S, 1> query_bias{}, key_bias{}, value_bias{}, output_bias{}, gate_bias{}, q_norm{}, k_norm{};
  bool accumulate = false;  // add to what is there instead of writing it over
};

template <viewable X, class Operator, class OperatorBackward, viewable D,
          class Weights = multi_head_weights<element_of<const X&>>,
          class Options = multi_head_options<element_of<const X&>>>
void multi_head_backward(const X& x, const Weights& weights, Operator&& op, OperatorBackward&& op_backward,
                         const D& d_out, const multi_head_gradients<element_of<const X&>>& gradients,
                         Options&& options = {}, execution_ref exec = {}) {
  using S = element_of<const X&>;
  const auto [from, d] = detail::inputs_of(x, d_out);
  const auto& w = detail::weights_of<multi_head_weights<S>>(weights);
  const auto& given = detail::options_or_default<multi_head_options<S>>(options);
  constexpr const char* name = "multi_head_backward";
  detail::call_multi_head_backward<S>(from, w, detail::attend_of<S>(name, op, w),
                                      detail::attend_backward_of<S>(name, op_backward, w), d, gradients, given,
                                      detail::plain_execution_of("multi_head_backward", exec, options));
}

}}  // namespace attn::ATTN_ISA

#define ATTN_RUN(S) void call_multi_head_backward<S>(const tensor_view<const S, 3>&, const multi_head_weights<S>&,     \
  const attend_ref<S>&, const attend_backward_ref<S>&, const tensor_view<const S, 3>&,                                 \
  const multi_head_gradients<S>&, const multi_head_options<S>&, execution&)
#include <attn/core/detail/compiled.hpp>
