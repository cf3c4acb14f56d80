// attn: products of matrices in panels, for matrices that are small compared with the sequence: projections and
// landmarks.
#pragma once

#include <attn/core/execution.hpp>
#include <attn/core/detail/tile_product.hpp>

namespace attn::inline ATTN_ISA::detail {

/// Segment a of `length` tokens in `count` segments begins at token floor(a length / count).
inline index segment_begin(index a, index length, index count) {
  const index whole = length / count, rest = length % count;
  return a * whole + a * rest / count;  // a * length might overflow
}
/// The segment that contains token i; count <= length.
inline index segment_of(index i, index length, index count) { return ((i + 1) * count - 1) / length; }

/// A matrix in panels [capacity][panel_width], as pack_panels writes it: an operand of a product or its result. Rows up
/// to `capacity`, a multiple of tile_rows, may be read and written: they hold zeros.
template <class T>
struct panel_matrix {
  static constexpr index wide = panel_width<T>;

  T* data = nullptr;
  index rows = 0, cols = 0, capacity = 0;

  static panel_matrix layout(arena& memory, index rows, index cols) {
    const index capacity = round_up(rows, tile_rows);
    return {memory.allocate<T>(capacity * round_up(cols, wide)), rows, cols, capacity};
  }

  index size() const { return capacity * round_up(cols, wide); }
  void clear() const { std::fill_n(data, size(), T(0)); }
  T* at(index row, index col) const { return data + col / wide * capacity * wide + row * wide + col % wide; }
};

/// Rows of such a matrix as the left operand.
template <class T>
struct panel_rows {
  const T* data;
  index panel;  // numbers from one panel to the next
  ATTN_INLINE T at(int m, index k) const {
    return data[k / panel_width<T> * panel + k % panel_width<T> + m * panel_width<T>];
  }
};

/// done(row, col, sum) takes sum over k < depth of a(row, k) b(k, col) for every row < rows, rounded up to a tile's
/// height, and every packet of columns. left(row) is the left operand from that row on; b lies in panels of `capacity`
/// rows. Capacity and depth count operands P.
template <class P, class Left, class Done>
void panel_product(Left&& left, index rows, const P* b, index capacity, index cols, index depth, Done&& done) {
  for (index col = 0; col < cols; col += widest_tile<P>)
    for (index row = 0; row < rows; row += tile_rows)
      with_tile_height(std::min<index>(tile_rows, rows - row), [&](auto M) {
        panel_products<P, M.value>(left(row), b, capacity * panel_width<P>, col, std::min(col + widest_tile<P>, cols),
                                   depth, [&](auto m, index n, const auto& sum) { done(row + m, n, sum); });
      });
}

}  // namespace attn::detail
