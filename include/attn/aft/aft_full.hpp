// attn: the attention-free transformer with a learned bias for every pair of positions.
//
//   out_t = sigmoid(q_t) * sum_t' e^(k_t' + w_tt') v_t' / sum_t' e^(k_t' + w_tt')       each channel separately
//                                                                  Zhai et al. 2021, "An attention free transformer"
//
//   attn::aft_full(q, k, v, out, w);                             // Eigen matrices [length, dim], w [length, length]
//   attn::aft_full(q, k, v, out, w, {.causal = true}, threads);
//
// k and w may be of any size: nothing overflows, and no channel is lost where the largest k and the largest w belong to
// different keys (aft_block.hpp says why). Where k or w is beyond 1e7 (double: 5e15), sums k + w that differ by less
// than 2^-20 (double: 2^-49) of that size count as equal. A w of -infinity masks; a row that sees no key is 0.
//
// Shapes   q, k, v, out [B, H, L, D]; w [L, L], one for all heads, or [H, L, L]. float, double, or Eigen::half /
//          Eigen::bfloat16 in memory with float arithmetic.
// Cost     4 B H L^2 D operations, half of it when causal, and L^2 exponentials for every 512 channels that share w.
//          Rows in which no e^(k + w) reaches 10^-25 of e^(max k + max w) are computed again, several times slower.
//          Scratch: 2 L numbers a channel, of 512 channels at a time.
// Values   `out` is finite where the sums before its division are in the range of the compute type (float: 3.4e38).
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
#pragma once

#include <attn/aft/detail/aft_window_run.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct aft_full_options {
  bool causal = false;         ///< row t sees the keys up to t
  list_view<idx_t> lengths{};  ///< true lengths, one per batch item; rows of padding are 0 in out
  bool gate = true;            ///< multiply by sigmoid(q); without, q is not read
  key_mask_view key_mask{};    ///< [B or 1, L] of bool or bytes; false for a key that no row sees

  operator detail::aft_parameters() const { return {lengths, causal, gate, key_mask}; }
};

template <viewable Q, viewable K, viewable V, viewable O, viewable W,
          class Options = aft_full_options<element_of<const Q&>>>
void aft_full(const Q& q, const K& k, const V& v, O&& out, const W& w, Options&& options = {},
              execution_ref exec = {}) {
  using S = element_of<const Q&>;
  auto call = detail::checked_aft<aft_full_options<S>>("aft_full", q, k, v, out, w, options, exec);
  const auto grid = detail::check_aft_full(call.views, call.x);
  detail::run_aft_window(call.x, grid, call.exec);
}

}}  // namespace attn::ATTN_ISA
