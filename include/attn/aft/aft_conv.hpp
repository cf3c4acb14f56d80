// attn: the attention-free transformer whose biases depend on the distance of positions alone, as a convolution.
//
//   out_t = sigmoid(q_t) * sum_t' e^(k_t' + w_(t'-t)) v_t' / sum_t' e^(k_t' + w_(t'-t))       each channel on its own
//   with w = 0 beyond the kernel: such keys are seen all the same.  Zhai et al. 2021, "An attention free transformer"
//
//   attn::aft_conv(q, k, v, out, w);                                  // w [heads, width], width odd
//   attn::aft_conv(q, k, v, out, w, {.grid = attn::token_grid{14, 14}});   // an image: w [heads, height, width]
//
// k and w may be of any size up to 5e37, as for aft_full. A w of -infinity masks; a row that sees no key is 0.
//
// Shapes   q, v, out [B, H, L, D], k [B, H, L, D], or [B, H, L, 1]: one key for all channels of a head. w [H, width] or
//          [1, width]; entry p belongs to t' = t + p - width / 2 (rounded down). For an image of rows x columns tokens,
//          row by row, w [H, height, width] or [1, height, width], both odd, counted alike in rows and columns.
//          float, double, or Eigen::half / Eigen::bfloat16 in memory with float arithmetic.
// Cost     4 B H L (width + 95) D operations, half of it when causal; for images height times as many, at most that of
//          whole rows; some data take longer, as for aft_full. Scratch: about a million numbers a thread, and a
//          sixteenth of k; for images 12 numbers a channel for every row of up to 96 columns, 6 more for every 96 more.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
#pragma once

#include <attn/aft/detail/aft_window.hpp>

#include <optional>

namespace attn::inline ATTN_ISA {

/// Tokens of an image, row by row.
struct token_grid {
  index rows = 0, columns = 0;
};

/// Options of aft_conv for elements of type S.
template <class S>
struct aft_conv_options {
  static_assert(element<S>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");

  /// The tokens are those of an image; otherwise they stand in one line.
  std::optional<token_grid> grid{};
  /// Row t sees the keys up to t; the half of the kernel that looks ahead is not used. Not for images.
  bool causal = false;
  /// Multiply by sigmoid(q); without, q is not read.
  bool gate = true;
  /// True lengths, one per batch item: for an image, its first tokens. Rows of padding are 0 in out.
  list_view<index> lengths{};
};

namespace detail {

/// Checks kernels w: one or one a head, of odd width, and of odd height for images.
template <class S>
void check_kernels(const validator& check, const tensor_view<const S>& w, index heads, bool image) {
  if (!image) check.equal("w of rank 2, [heads, width], with leading extent", 1, w.extent(1));
  check.broadcasts("w heads", heads, w.extent(image ? 1 : 2));
  if (w.extent(3) % 2 == 0) check.fail("w of odd width", w.extent(3));
  if (image && w.extent(2) % 2 == 0) check.fail("w of odd height", w.extent(2));
}

template <class S>
void aft_conv(const validator& check, const tensor_view<const S>& q, const tensor_view<const S>& k,
              const tensor_view<const S>& v, const tensor_view<S>& out, const tensor_view<const S>& w,
              const aft_conv_options<S>& options, execution& exec) {
  const aft_call<S> call = check_aft(check, q, k, v, out, options, true);
  check_parameter(check, w, out);
  const bool image = options.grid.has_value();
  check_kernels(check, w, call.heads, image);
  aft_window_grid grid{1, call.length, 0, w.extent(3) / 2, options.causal};
  if (image) {
    if (options.causal) check.fail("an image without causal", "causal = true");
    check.at_least("grid rows", 0, options.grid->rows);
    check.at_least("grid columns", 0, options.grid->columns);
    check.equal("grid rows * columns = length", call.length, check.fits("grid", {options.grid->rows, options.grid->columns}));
    grid.lines = options.grid->rows, grid.columns = options.grid->columns, grid.up = w.extent(2) / 2;
  }
  const bool shared = w.extent(image ? 1 : 2) == 1;
  const auto matrix = [&](index h) {
    if (image) return head_of(w, 0, shared ? 0 : h);
    const auto all = head_of(w, 0, 0);
    return matrix_view<const S>{all.row(shared ? 0 : h), 1, all.cols, all.row_stride, all.col_stride};
  };
  if (call.length == 0) return;
  aft_window_call<S, decltype(matrix)>{call, grid, aft_window_layout::kernel, shared, matrix}.run(exec);
}

}  // namespace detail

/// Attention-free mixing with a convolution's biases, by an execution, which may be left out. See the top of the file.
template <viewable Q, viewable K, viewable V, viewable O, viewable W>
void aft_conv(const Q& q, const K& k, const V& v, O&& out, const W& w,
              const aft_conv_options<element_of<const Q&>>& options, execution& exec) {
  detail::require_aft_types<const Q&, const K&, const V&, O, const W&>();
  using S = element_of<const Q&>;
  detail::aft_conv<S>(detail::validator("aft_conv"), as_view(q), as_view(k), as_view(v), as_view(out),
                      detail::parameter_view(w), options, exec);
}

template <viewable Q, viewable K, viewable V, viewable O, viewable W>
void aft_conv(const Q& q, const K& k, const V& v, O&& out, const W& w,
              const aft_conv_options<element_of<const Q&>>& options = {}) {
  execution serial;
  aft_conv(q, k, v, out, w, options, serial);
}

}  // namespace attn
