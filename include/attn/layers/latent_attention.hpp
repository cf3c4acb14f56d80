// attn: multi-head latent attention, the core: keys and values of all heads are made from latents that they share.
//
//   k_hj = [W_h c_j; k_rotary_j],  v_hj = U_h c_j,
//   s_hij = softcap(scale (q_hi . W_h c_j + q_rotary_hi . k_rotary_j)) + bias_ij - slope |p_i - j|
//   out_hi = sum_j softmax_j(s_hij) U_h c_j                   DeepSeek-AI 2024, "DeepSeek-V2", section 2.1
//
//   attn::latent_attention(q, q_rotary, latent, k_rotary, w_key, w_value, out, {.causal = true}, threads);
//
// Two forms give the same to rounding (16-bit elements: to that of what is made, which is rounded to them):
//   expanded   keys and values are made for every head, then attended as full_softmax does: for prompts and training
//   absorbed   [W_h^T q_h; q_rotary_h] attends [c; k_rotary], one key head whose values are c; then U_h: for decoding
// Which takes fewer operations decides, by lengths and dims alone, unless `form` is given.
//
// Shapes   q [B, H, Lq, Dn], q_rotary [B, H, Lq, Dr], latent [B, 1, Lk, r], k_rotary [B, 1, Lk, Dr], w_key [H, Dn, r],
//          w_value [H, Dv, r] (views of the elements of q, of any strides: parts of one weight [H (Dn + Dv), r]), out
//          [B, H, Lq, Dv]. Dr may be 0: q_rotary and k_rotary are then empty, or null views. Both have been rotated;
//          queries and keys are where full_softmax has them. float, double, or Eigen::half / Eigen::bfloat16.
//          Where q_rotary follows q in memory, as channels of the same rows, and k_rotary the latents, they are read
//          in place, else copied.
// Cost     expanded 2 B H (Lk r (Dn + Dv) + Lq Lk (Dn + Dr + Dv)) operations, absorbed 2 B H (Lq r (Dn + Dv) + Lq Lk
//          (2 r + Dr)); causal half of the terms in Lq Lk. Scratch: packed weights; expanded, keys and values of some
//          heads, 32 MiB of a batch item or those of one head; absorbed, B H Lq (2 r + Dr) numbers; and what
//          full_softmax takes. Never Lq x Lk.
// Result   as full_softmax, for rows that see no key too.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
#pragma once

#include <attn/layers/detail/latent_attention_run.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Options of latent_attention for elements of type S: as in full_softmax_options, and the form.
template <class S>
struct latent_attention_options {
  using real = compute_type<S>;
  static constexpr unsigned shared = detail::fields::causal | detail::fields::lengths | detail::fields::first_position |
                                     detail::fields::bias | detail::fields::masks | detail::fields::of_softmax;

  std::optional<real> scale{};  // factor of the products; 1 / sqrt(Dn + Dr) unless given
  bool causal = false;
  list_view<idx_t> lengths{}, query_lengths{}, key_lengths{};
  std::optional<idx_t> first_position{};
  view_field<const real> bias{};
  mask_view mask{};
  key_mask_view key_mask{};
  std::optional<real> softcap{};
  list_view<real> alibi_slopes{}, sinks{};
  latent_form form = latent_form::automatic;
  view_field<real, 3> lse{};  // written if given: the natural logarithm of the denominator, sink included, [B, H, Lq]
};

/// Attention over latents; options and execution may each be left out. See the top of the file.
template <viewable Q, viewable QR, viewable L, viewable KR, viewable W, viewable U, viewable O,
          class Options = latent_attention_options<element_of<const Q&>>>
void latent_attention(const Q& q, const QR& q_rotary, const L& latent, const KR& k_rotary, const W& w_key,
                      const U& w_value, O&& out, Options&& options = {}, execution_ref exec = {}) {
  using S = element_of<const Q&>;
  const auto& given = detail::options_or_default<latent_attention_options<S>>(options);
  auto views = detail::latent_views<S>::of(q, q_rotary, latent, k_rotary, w_key, w_value);
  detail::require_one_element_type<const Q&, const L&, const L&, O&>();
  detail::call_views check{"latent_attention"};
  detail::run_latent_attention(
      detail::checked_latent_call(check, views, tensor_view<S>(as_view(out)), given, given.form,
                                  detail::plain_execution_of("latent_attention", exec, options)));
}

}}  // namespace attn::ATTN_ISA
