// attn: the gradients of latent_attention.
//
//   attn::latent_attention(q, q_rotary, latent, k_rotary, w_key, w_value, out, {.causal = true, .lse = lse}, threads);
//   attn::latent_attention_backward(q, q_rotary, latent, k_rotary, w_key, w_value, out, d_out,
//                                   {.q = dq, .q_rotary = dq_rotary, .latent = dc, .k_rotary = dk_rotary,
//                                    .w_key = dw, .w_value = du}, {.causal = true, .lse = lse}, threads);
//
// With dk_h, dv_h the gradients of the keys and values of head h (full_softmax_backward.hpp):
//   dc = sum_h W_h^T dk_h + U_h^T dv_h,  dk_rotary = sum_h of the last Dr channels of dk_h,
//   dW_h = sum_j dk_hj c_j^T,  dU_h = sum_j dv_hj c_j^T, over the tokens of all items.
//
// Shapes   as the forward call's; out and lse are what it wrote, d_out as out, d_lse as lse; gradients as their inputs.
// Cost     2 B H (Lq Lk (3 (Dn + Dr) + 2 Dv) + 3 Lk r (Dn + Dv)) operations, in the term of Lq half where causal;
//          without lse one product more. It runs in the expanded form, whichever `form` the forward call had: gradients
//          are those of the formula. With 16-bit elements the lse of an absorbed call is computed again. Scratch: keys,
//          values and their gradients of some heads, 32 MiB of an item each or those of one head; Lk (r + Dr) numbers
//          of each item; and what full_softmax_backward and project_backward take.
// Throws   as the forward call, and for gradients of what was not given or in memory of an input or another gradient.
#pragma once

#include <attn/layers/detail/latent_attention_backward_run.hpp>
#include <attn/layers/latent_attention.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct latent_attention_gradients {
  using real = compute_type<S>;

  view_field<S> q{}, q_rotary{}, latent{}, k_rotary{};
  view_field<S, 3> w_key{}, w_value{};  // [H, Dn, r] and [H, Dv, r]
  view_field<real> bias{};  // as bias: [B or 1, H or 1, Lq or 1, Lk], summed over what it is broadcast over
  view_field<real, 1> alibi_slopes{}, sinks{};  // [H]
  view_field<const real, 3> d_lse{};  // read, not written: the gradient of lse, [B, H, Lq]
  bool accumulate = false;  // add to what is there instead of writing it over
};

template <viewable Q, viewable QR, viewable L, viewable KR, viewable W, viewable U, viewable O, viewable D,
          class Options = latent_attention_options<element_of<const Q&>>>
void latent_attention_backward(const Q& q, const QR& q_rotary, const L& latent, const KR& k_rotary, const W& w_key,
                               const U& w_value, const O& out, const D& d_out,
                               const latent_attention_gradients<element_of<const Q&>>& gradients,
                               Options&& options = {}, execution_ref exec = {}) {
  using S = element_of<const Q&>;
  detail::require_one_element_type<const Q&, const O&, const D&, tensor_view<S>>();
  const auto& given = detail::options_or_default<latent_attention_options<S>>(options);
  auto views = detail::latent_views<S>::of(q, q_rotary, latent, k_rotary, w_key, w_value);
  detail::call_views check{"latent_attention_backward"};
  const tensor_view<const S> result = as_view(out), d = as_view(d_out);
  const auto& g = gradients;
  const detail::attention_shape shape = views.validate(check, result);
  check.read("out", result);
  detail::read_gradient_of_out(check, shape, result, d, given.lse, g.d_lse);
  check.gradient("q", g.q, views.q), check.gradient("q_rotary", g.q_rotary, views.q_rotary);
  check.gradient("latent", g.latent, views.latent), check.gradient("k_rotary", g.k_rotary, views.k_rotary);
  check.gradient("w_key", g.w_key, views.w_key), check.gradient("w_value", g.w_value, views.w_value);
  check.gradient("bias", g.bias, given.bias);
  check.gradient("alibi_slopes", g.alibi_slopes, detail::list_layout(given.alibi_slopes));
  check.gradient("sinks", g.sinks, detail::list_layout(given.sinks));
  detail::latent_backward_call<S> call{
      detail::latent_call_of(check, views, shape, given, given.form,
                             detail::plain_execution_of("latent_attention_backward", exec, options)), result, d,
      g.d_lse, g.q, g.q_rotary, g.latent, g.k_rotary, g.w_key, g.w_value, g.bias, g.alibi_slopes, g.sinks,
      g.accumulate};
  detail::run_latent_attention_backward(call);
}

}}  // namespace attn::ATTN_ISA
