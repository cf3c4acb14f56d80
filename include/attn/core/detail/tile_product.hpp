// attn: the register-blocked product every operator's cost goes into, and the packed form its operands take.
//
//   C[m, n] = sum over k of A[m, k] * B[k, n]
//
// One tile of C, tile_rows x panel_width<T>, stays in registers while k runs: per step two vectors of B are loaded and
// tile_rows numbers of A broadcast, so nearly every instruction is a multiply-add. B comes in panels: [k][panel_width],
// contiguous, padded. Every element of C is one chain of multiply-adds in the order of k, whatever the tile,
// so results do not depend, to the last bit, on how rows and columns fall into tiles.
//
//   1. pack_panels         rows of a matrix become k:        B = X      (X [k, n], e.g. values)
//   2. pack_panels_across  rows of a matrix become columns:  B = X^T    (X [n, k], e.g. keys)
//   3. pack_rows           the A operand as [k][tile_rows]   (queries)
//   4. tile_product        one tile
#pragma once

#include <attn/core/detail/simd.hpp>

#include <algorithm>

namespace attn::inline ATTN_ISA::detail {

/// Rows of the largest tile: with two vectors a row, 24 of 32 registers accumulate, or 12 of 16.
inline constexpr int tile_rows = registers >= 32 ? 12 : 6;
/// Tiles come in these heights; a remainder of rows is padded to the next.
inline constexpr int tile_step = tile_rows / 3;

/// Columns of a panel: two vectors.
template <class T>
inline constexpr int panel_width = 2 * width<T>;

constexpr index round_up(index n, index step) { return (n + step - 1) / step * step; }
constexpr index floor_div(index n, index d) { return n / d - (n % d < 0); }
constexpr index ceil_div(index n, index d) { return -floor_div(-n, d); }

// Packing -------------------------------------------------------------------------------------------------------------

/// `count` elements from p on, `stride` apart, converted to T; zeros after them. Kept out of line: the slow way.
template <class T, class S>
[[gnu::noinline]] packet<T> gather_part(const S* p, index stride, index count) {
  alignas(64) T lanes[width<T>] = {};
  const index n = std::min<index>(count, width<T>);
  for (index i = 0; i < n; ++i) lanes[i] = static_cast<T>(p[i * stride]);
  return load<T>(lanes);
}

/// A packet of `count` elements from p on, converted to T; zeros after them.
template <class T, class S>
ATTN_INLINE packet<T> load_part(const S* p, index stride, index count) {
  if (stride == 1 && count >= width<T>) return load_as<T>(p);
  return gather_part<T>(p, stride, count);
}

/// Pointers to width<T> rows of X from row r0 on; the last row stands in for those beyond it.
template <class T, class S>
struct row_pointers {
  const S* at[width<T>];

  template <class Row>
  row_pointers(Row&& row, index r0, index rows) {
    for (int i = 0; i < width<T>; ++i) at[i] = row(std::min(r0 + i, rows - 1));
  }
};

/// width x width elements of X^T: lane i of packet j is element c0 + j of row i, 0 beyond the last column.
template <class T, class S>
ATTN_INLINE void load_across(packet<T> (&square)[width<T>], const row_pointers<T, S>& rows, index c0, index cols,
                             index stride) {
  if (stride == 1 && c0 + width<T> <= cols)
    unroll<width<T>>([&](auto i) { square[i] = load_as<T>(rows.at[i] + c0); });
  else
    for (int i = 0; i < width<T>; ++i) square[i] = gather_part<T>(rows.at[i] + c0 * stride, stride, cols - c0);
  transpose<T>(square);
}

/// Elements of width<T> rows of X, times `factor`, as [col][Stride]. Out of line: one copy for all that calls it.
template <class T, int Stride, class S>
[[gnu::noinline]] void pack_across(const row_pointers<T, S>& rows, index cols, index col_stride, T factor, T* to) {
  constexpr int w = width<T>;
  const packet<T> scale = broadcast<T>(factor);
  for (index c = 0; c < cols; c += w, to += w * Stride) {
    packet<T> square[w];
    load_across(square, rows, c, cols, col_stride);
    if (c + w <= cols)
      unroll<w>([&](auto j) { store<T>(to + j * Stride, mul(square[j], scale)); });
    else
      for (int j = 0; j < cols - c; ++j) store<T>(to + j * Stride, mul(square[j], scale));
  }
}

/// Packs rows [0, rows) of X as the columns of panels: panel p holds rows p * panel_width ..., as [col][panel_width],
/// the last row again to fill it. Takes round_up(rows, panel_width) * cols elements.
template <class T, class Row>
void pack_panels_across(Row&& row, index rows, index cols, index col_stride, T* panels) {
  using S = std::remove_cvref_t<decltype(*row(0))>;
  constexpr int wide = panel_width<T>;
  for (index r = 0; r < rows; r += wide, panels += cols * wide)
    for (int half = 0; half < wide; half += width<T>)
      pack_across<T, wide>(row_pointers<T, S>(row, std::min(r + half, rows - 1), rows), cols, col_stride, T(1),
                           panels + half);
}

/// Packs rows [first, first + rows) of X into panels [capacity][panel_width] whose rows are X's: panel p holds columns
/// p * panel_width ... of all rows. `panels` takes capacity * round_up(cols, panel_width) elements. Tells whether every
/// number packed is finite.
template <class T, class Row>
bool pack_panels(Row&& row, index first, index rows, index cols, index col_stride, T* panels, index capacity) {
  constexpr int w = width<T>, wide = panel_width<T>;
  packet<T> trace = zero<T>();  // 0 * x is NaN for an x that is not finite, and stays
  const index whole = col_stride == 1 ? cols / w * w : 0;
  for (index r = first; r < first + rows; ++r) {
    const auto* x = row(r);
    const auto put = [&](index c, const packet<T>& part) {
      trace = fma(part, zero<T>(), trace);
      store<T>(panels + (c / wide) * capacity * wide + r * wide + c % wide, part);
    };
    for (index c = 0; c < whole; c += w) put(c, load_as<T>(x + c));
    for (index c = whole; c < cols; c += w) put(c, load_part<T>(x + c * col_stride, col_stride, cols - c));
  }
  return sum_lanes(trace) == T(0);
}

/// Packs `rows` <= tile_rows rows as [col][tile_rows], each element times `factor`; the last row fills up. Takes
/// tile_rows * cols elements and writes up to width<T> beyond them.
template <class T, class Row>
void pack_rows(Row&& row, index rows, index cols, index col_stride, T factor, T* packed) {
  using S = std::remove_cvref_t<decltype(*row(0))>;
  // Packets overlap the next column where tile_rows < w, and the packet before where w does not divide tile_rows.
  for (int r = 0; r < tile_rows; r += width<T>) {
    const int r0 = r > 0 ? std::min(r, tile_rows - width<T>) : 0;
    pack_across<T, tile_rows>(row_pointers<T, S>(row, r0, rows), cols, col_stride, factor, packed + r0);
  }
}

// Products ------------------------------------------------------------------------------------------------------------

/// The A operand: where element (m, k) lies. Both strides are known to the compiler, which turns them into addresses.
template <class T, int RowStride, int DepthStride>
struct left_operand {
  const T* data;
  ATTN_INLINE T at(int m, index k) const { return data[m * RowStride + k * DepthStride]; }
};

template <class T>
using packed_rows = left_operand<T, 1, tile_rows>;

/// acc[m][n] = sum over k < depth of a(m, k) * panel[k][n] for M rows and N vectors; done(m, n, sum) takes each result.
/// The rows of the panel lie Stride numbers apart.
template <class T, int M, int N, int Stride = panel_width<T>, class A, class Done>
ATTN_INLINE void tile_product(A a, const T* panel, index depth, Done&& done) {
  packet<T> acc[M][N];
  unroll<M>([&](auto m) { unroll<N>([&](auto n) { acc[m][n] = zero<T>(); }); });
  for (index k = 0; k < depth; ++k) {
    packet<T> b[N];
    unroll<N>([&](auto n) { b[n] = load<T>(panel + k * Stride + n * width<T>); });
    unroll<M>([&](auto m) {
      const packet<T> x = broadcast<T>(a.at(m, k));
      unroll<N>([&](auto n) { acc[m][n] = fma(x, b[n], acc[m][n]); });
    });
  }
  unroll<M>([&](auto m) { unroll<N>([&](auto n) { done(m, n, acc[m][n]); }); });
}

/// Calls f(integral_constant<int, M>) with the tile height M that holds `rows` <= tile_rows rows.
template <class F>
ATTN_INLINE void with_tile_height(index rows, F&& f) {
  if (rows > 2 * tile_step)
    f(std::integral_constant<int, tile_rows>{});
  else if (rows > tile_step)
    f(std::integral_constant<int, 2 * tile_step>{});
  else
    f(std::integral_constant<int, tile_step>{});
}

}  // namespace attn::detail
