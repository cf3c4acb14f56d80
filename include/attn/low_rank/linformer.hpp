// attn: softmax attention over keys and values projected along the sequence.
//
//   out_i = sum_r softmax_r(scale q_i.(E k)_r) (F v)_r        Wang et al. 2020, "Linformer: Self-attention with linear
//                                                              complexity"
//   const auto e = attn::draw_projection<float>(256, length, {.seed = 7});
//   attn::linformer(q, k, v, out, e, f);                       // Eigen matrices [length, dim], e and f [rank, length]
//   attn::linformer(q, k, v, out, e, e, {.lengths = lengths}, threads);  // one projection for keys and values
//
// E and F belong to a trained model: random ones, as drawn by draw_projection, are where training starts.
//
// Shapes   as full_softmax; e and f [H or 1, rank, Lk]: one per query head, or one for all; any rank >= 1.
// Cost     2 rank (Lq + Lk) (D + Dv) operations per head. Scratch: the projected keys and values, rank (D + Dv) numbers
//          per head, twice, of one batch item at a time, or of several with 32 heads together; and E and F packed for
//          some tokens at a time: 2^20 numbers, or 256 tokens of every head's E and F, if that is more.
// Lengths  A sequence of n keys is projected by the first n columns of E and F. A sequence without keys gives zeros.
//          Hidden keys are projected as zeros: as without their columns of E and F, which must be finite.
// Values   `out` is finite where the sums before its division are in the range of the compute type (float: 3.4e38).
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written. There is no causal
//          form, and no such option: every projected key mixes all tokens, also those after a query.
#pragma once

#include <attn/low_rank/detail/linformer_run.hpp>
#include <attn/low_rank/draw_projection.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct linformer_options {
  using real = compute_type<S>;
  static constexpr unsigned shared = detail::fields::lengths | detail::fields::key_mask | detail::fields::lse;

  std::optional<real> scale{};  // factor of q.(E k); 1 / sqrt(D) unless given
  /// True lengths, one per batch item: for queries and keys alike, or separately. Rows of padding are 0 in out.
  list_view<idx_t> lengths{}, query_lengths{}, key_lengths{};
  /// Which keys are there at all, such as those of left padding: [B or 1, Lk] of bool or bytes.
  key_mask_view key_mask{};
  view_field<real, 3> lse{};  // written if given: the natural logarithm of the denominator, [B, H, Lq]
};

template <viewable Q, viewable K, viewable V, viewable O, viewable E, viewable F,
          class Options = linformer_options<element_of<const Q&>>>
void linformer(const Q& q, const K& k, const V& v, O&& out, const E& e, const F& f, Options&& options = {},
               execution_ref exec = {}) {
  using S = element_of<const Q&>;
  const tensor_view<const S, 3> by_e = detail::projection_view<S>(e), by_f = detail::projection_view<S>(f);
  const detail::memory_layout lse = detail::options_or_default<linformer_options<S>>(options).lse;
  auto call = detail::checked_call<linformer_options>("linformer", q, k, v, out, options, exec, lse);
  const detail::attention_shape& s = call.shape;
  const auto given = detail::parameters_of<S>(call.options);
  detail::check_softmax_options(call.views, s, given);
  detail::check_projections(call.views, s, by_e, by_f);
  const detail::seen_lengths lengths(call.options.key_mask, s.batch, call.lengths, call.exec);
  const detail::linformer_call<S> checked{call, by_e, by_f, detail::terms_of_sums(given, s.dim),
                                          call.options.key_mask, call.options.lse};
  detail::run_linformer(checked, call.exec);
}

}}  // namespace attn::ATTN_ISA
