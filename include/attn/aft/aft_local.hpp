// attn: the attention-free transformer with biases for near positions only.
//
//   out_t = sigmoid(q_t) * sum_t' e^(k_t' + w_tt') v_t' / sum_t' e^(k_t' + w_tt')       each channel separately
//   with w_tt' = 0 for |t - t'| >= s: such keys are still seen.
//                                                                  Zhai et al. 2021, "An attention free transformer"
//
//   attn::aft_local(q, k, v, out, w, {.window = 128});                            // w [length, length]
//   attn::aft_local(q, k, v, out, w, {.causal = true, .window = 128, .band = true});   // w [length, 2 * 128 - 1]
//
// k and w may be of any size, as for aft_full. A w of -infinity masks; a row that sees no key is 0.
//
// Shapes   q, k, v, out [B, H, L, D]; w [L, L], one for all heads, or [H, L, L]. A band is [L, 2 s - 1] or
//          [H, L, 2 s - 1]: entry p of row t belongs to t' = t + p - s + 1. float, double, or Eigen::half /
//          Eigen::bfloat16 in memory with float arithmetic.
// Cost     4 B H L (2 s + 94) D operations, half of it when causal; some data take longer, as for aft_full. Scratch: a
//          sixteenth of k, and about a million numbers a thread.
// Values   `out` is finite where the sums before its division are in the range of the compute type (float: 3.4e38).
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
#pragma once

#include <attn/aft/detail/aft_window_run.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct aft_local_options {
  bool causal = false;         ///< row t sees the keys up to t
  list_view<idx_t> lengths{};  ///< true lengths, one per batch item; rows of padding are 0 in out
  idx_t window = 128;          ///< s: positions nearer than this have a bias, >= 1; may be longer than the sequence
  bool band = false;           ///< w is a band [L, 2 s - 1] instead of [L, L]
  bool gate = true;            ///< multiply by sigmoid(q); without, q is not read
  key_mask_view key_mask{};    ///< [B or 1, L] of bool or bytes; false for a key that no row sees

  operator detail::aft_parameters() const { return {lengths, causal, gate, key_mask}; }
};

/// Attention-free mixing with biases for near positions. See the top of the file. Options and an execution may be left
/// out.
template <viewable Q, viewable K, viewable V, viewable O, viewable W,
          class Options = aft_local_options<element_of<const Q&>>>
void aft_local(const Q& q, const K& k, const V& v, O&& out, const W& w, Options&& options = {},
               execution_ref exec = {}) {
  using S = element_of<const Q&>;
  const auto& given = detail::options_or_default<aft_local_options<S>>(options);
  auto call = detail::checked_aft<aft_local_options<S>>("aft_local", q, k, v, out, w, options, exec);
  const auto grid = detail::check_aft_local(call.views, call.x, given.window, given.band);
  detail::run_aft_window(call.x, grid, call.exec);
}

}}  // namespace attn::ATTN_ISA
