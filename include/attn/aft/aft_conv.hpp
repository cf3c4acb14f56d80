// attn: the attention-free transformer whose biases depend on the distance of positions alone, as a convolution.
//
//   out_t = sigmoid(q_t) * sum_t' e^(k_t' + w_(t'-t)) v_t' / sum_t' e^(k_t' + w_(t'-t))       each channel separately
//   with w = 0 beyond the kernel: such keys are still seen.        Zhai et al. 2021, "An attention free transformer"
//
//   attn::aft_conv(q, k, v, out, w);                                  // w [heads, width], width odd
//   attn::aft_conv(q, k, v, out, w, {.grid = attn::token_grid{14, 14}});   // an image: w [heads, height, width]
//
// k and w may be of any size, as for aft_full. A w of -infinity masks; a row that sees no key is 0.
//
// Shapes   q, v, out [B, H, L, D], k [B, H, L, D], or [B, H, L, 1]: one key for all channels of a head. w [H, width] or
//          [1, width]; entry p belongs to t' = t + p - width / 2 (rounded down). For an image of rows x columns tokens,
//          row by row, w [H, height, width] or [1, height, width], both odd, counted alike in rows and columns.
//          float, double, or Eigen::half / Eigen::bfloat16 in memory with float arithmetic.
// Cost     4 B H L (width + 95) D operations, half of it when causal; for images height times as many, at most that of
//          whole rows; some data take longer, as for aft_full. Scratch: about a million numbers a thread, and a
//          sixteenth of k; for images 12 numbers a channel for every row of up to 96 columns, 6 more for every 96 more.
// Values   `out` is finite where the sums before its division are in the range of the compute type (float: 3.4e38).
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
#pragma once

#include <attn/aft/detail/aft_window_run.hpp>

#include <optional>

namespace attn { inline namespace ATTN_ISA {

/// Tokens of an image, row by row.
struct token_grid {
  idx_t rows = 0, columns = 0;
};

template <class S>
struct aft_conv_options {
  bool causal = false;               ///< row t sees the keys up to t, and half of the kernel is unused; not for images
  list_view<idx_t> lengths{};        ///< true lengths, one per batch item: of an image, its first tokens; the rest is 0
  std::optional<token_grid> grid{};  ///< the tokens are those of an image; otherwise they form one line
  bool gate = true;                  ///< multiply by sigmoid(q); without, q is not read
  key_mask_view key_mask{};          ///< [B or 1, L] of bool or bytes; false for a key that no row sees

  operator detail::aft_parameters() const { return {lengths, causal, gate, key_mask, true}; }
};

/// Attention-free mixing with a convolution's biases. See the top of the file. Options and an execution may be left
/// out.
template <viewable Q, viewable K, viewable V, viewable O, viewable W,
          class Options = aft_conv_options<element_of<const Q&>>>
void aft_conv(const Q& q, const K& k, const V& v, O&& out, const W& w, Options&& options = {},
              execution_ref exec = {}) {
  using S = element_of<const Q&>;
  const auto& given = detail::options_or_default<aft_conv_options<S>>(options);
  auto call = detail::checked_aft<aft_conv_options<S>>("aft_conv", q, k, v, out, w, options, exec);
  const auto grid = detail::check_aft_conv_grid(call.views, call.x, given.grid);
  if (call.x.length == 0) return;
  detail::run_aft_window(call.x, grid, call.exec);
}

}}  // namespace attn::ATTN_ISA
