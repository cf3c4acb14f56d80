// attn: products of matrices in panels, for matrices that are small compared with the sequence: projections and
// landmarks.
#pragma once

#include <attn/core/execution.hpp>
#include <attn/core/detail/tile_product.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Segment a of `length` tokens in `count` segments begins at token floor(a length / count).
inline idx_t segment_begin(idx_t a, idx_t length, idx_t count) {
  const idx_t whole = length / count, rest = length % count;
  return a * whole + a * rest / count;  // a * length might overflow
}
/// The segment that contains token i; count <= length.
inline idx_t segment_of(idx_t i, idx_t length, idx_t count) { return ((i + 1) * count - 1) / length; }

/// A matrix in panels [capacity][panel_width], as pack_panels writes it: an operand of a product or its result. Rows up
/// to `capacity`, a multiple of tile_rows, may be read and written: they hold zeros.
template <class T>
struct panel_matrix {
  static constexpr idx_t wide = panel_width<T>;

  T* data = nullptr;
  idx_t rows = 0, cols = 0, capacity = 0;

  static panel_matrix layout(arena& memory, idx_t rows, idx_t cols) {
    const idx_t capacity = round_up(rows, tile_rows);
    return {memory.allocate<T>(capacity * round_up(cols, wide)), rows, cols, capacity};
  }

  idx_t size() const { return capacity * round_up(cols, wide); }
  void clear() const { std::fill_n(data, size(), T(0)); }
  T* at(idx_t row, idx_t col) const { return data + col / wide * capacity * wide + row * wide + col % wide; }
};

/// Rows of such a matrix as the left operand.
template <class T>
struct panel_rows {
  const T* data;
  idx_t panel;  // numbers from one panel to the next
  ATTN_INLINE T at(int m, idx_t k) const {
    return data[k / panel_width<T> * panel + k % panel_width<T> + m * panel_width<T>];
  }
};

/// done(row, col, sum) takes sum over k < depth of a(row, k) b(k, col) for every row < rows, rounded up to a tile's
/// height, and every packet of columns. left(row) is the left operand from that row on; b lies in panels of `capacity`
/// rows. Capacity and depth count operands P.
template <class P, class Left, class Done>
void panel_product(Left&& left, idx_t rows, const P* b, idx_t capacity, idx_t cols, idx_t depth, Done&& done) {
  for (idx_t col = 0; col < cols; col += widest_tile<P>)
    for (idx_t row = 0; row < rows; row += tile_rows)
      products_of_rows<P>(rows - row, left(row), b, capacity * panel_width<P>, col,
                          (std::min)(col + widest_tile<P>, cols), depth,
                          [&](auto m, idx_t n, const auto& sum) { done(row + m, n, sum); });
}

/// Row r of `to` = factor (x y) for rows r of x; panels of its columns lie `panel` numbers apart.
template <class T>
[[gnu::noinline]] void matrix_product(const panel_matrix<T>& x, const panel_matrix<T>& y, T factor, T* to,
                                      idx_t row_stride, idx_t panel) {
  const auto left = [&](idx_t r) { return panel_rows<T>{x.at(r, 0), x.capacity * panel_width<T>}; };
  panel_product<T>(left, x.rows, y.data, y.capacity, y.cols, x.cols, [&](idx_t r, idx_t col, const auto& sum) {
    if (r < x.rows)
      store<T>(to + r * row_stride + col / panel_width<T> * panel + col % panel_width<T>,
               mul(sum, broadcast<T>(factor)));
  });
}
/// c = diagonal + factor x y
template <class T>
void matrix_product(const panel_matrix<T>& x, const panel_matrix<T>& y, T diagonal, T factor,
                    const panel_matrix<T>& c) {
  matrix_product(x, y, factor, c.data, panel_width<T>, c.capacity * panel_width<T>);
  for (idx_t i = 0; i < c.rows && diagonal != T(0); ++i) *c.at(i, i) += diagonal;
}

}}}  // namespace attn::ATTN_ISA::detail
