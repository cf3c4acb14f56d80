// attn: small matrices in panels, and the products that run from one into the next.
//
// A matrix lies in panels of panel_width<T> columns, [rows][panel_width] each, so that it serves as right operand of a
// product and, by its columns, as left one: a product here is C = A^T B with A and B as deep as they have rows. What is
// needed the other way round is transposed once. Sums over a triangle touch nothing beyond it, not even times 0, so
// that NaN stays with the rows that see it; they run from the square tiles into the triangle's own, row by row, which
// also solves triangular systems.
#pragma once

#include <attn/core/detail/tile_product.hpp>
#include <attn/core/execution.hpp>

namespace attn::inline ATTN_ISA::detail {

template <class T>
struct panels {
  static constexpr index wide = panel_width<T>;

  T* data = nullptr;
  index capacity = 0;  // rows: tiles may reach beyond those in use

  static panels layout(arena& memory, index rows, index cols) {
    const index capacity = round_up(rows, wide);
    return {memory.allocate<T>(capacity * round_up(cols, wide)), capacity};
  }

  T* panel(index col) const { return data + col / wide * capacity * wide; }
  T* at(index row, index col) const { return panel(col) + row * wide + col % wide; }
};

/// f(row, col, packets...) for each packet of rows x cols in the matrices; f returns what becomes of the first one.
template <class T, class F, class... More>
ATTN_INLINE void each_packet(index rows, index cols, F&& f, const panels<T>& to, const More&... from) {
  for (index col = 0; col < cols; col += width<T>)
    for (index row = 0; row < rows; ++row)
      store<T>(to.at(row, col), f(row, col, load<T>(from.at(row, col))...));
}

/// b = a^T, of rows x cols of a.
template <class T>
void transpose_panels(const panels<T>& a, index rows, index cols, const panels<T>& b) {
  for (index col = 0; col < cols; col += width<T>)
    for (index row = 0; row < rows; row += width<T>) {
      packet<T> square[width<T>];
      for (int i = 0; i < width<T>; ++i) square[i] = load<T>(a.at(row + i, col));
      transpose<T>(square);
      for (int i = 0; i < width<T>; ++i) store<T>(b.at(col + i, row), square[i]);
    }
}

/// done(row, col, sum) takes the sum over k < depth of a[k][row] b[k][col] for every packet of columns < cols and every
/// row < rows, and some beyond, up to a whole panel.
template <class T, class Done>
ATTN_INLINE void product(const panels<T>& a, index rows, const panels<T>& b, index cols, index depth, Done&& done) {
  constexpr index wide = panel_width<T>;
  for (index col = 0; col < cols; col += wide)
    for (index first = 0; first < rows; first += wide)
      for (index row = first; row < std::min(first + wide, rows); row += tile_rows)
        with_tile_height(std::min<index>(tile_rows, std::min(first + wide, rows) - row), [&](auto M) {
          const left_operand<T, 1, panel_width<T>> left{a.at(0, row)};
          const auto take = [&](auto m, auto half, const auto& sum) { done(row + m, col + half * width<T>, sum); };
          if (col + width<T> < cols)
            tile_product<T, M.value, 2>(left, b.panel(col), depth, take);
          else
            tile_product<T, M.value, 1>(left, b.panel(col), depth, take);
        });
}

/// The k a row of a triangle sums over: those before it, or those after it; with itself, or without.
enum class triangle { before, up_to, after, from };

/// One tile of the sum below, N packets wide.
template <triangle Form, int N, class T, class Finish>
ATTN_INLINE void triangle_tile(const panels<T>& a, index row, index rows, const T* panel, index count,
                               Finish&& finish) {
  constexpr index wide = panel_width<T>;
  constexpr bool before = Form == triangle::before || Form == triangle::up_to;
  constexpr index own = Form == triangle::up_to || Form == triangle::from ? 1 : 0;
  const index first = before ? 0 : row + rows, last = before ? row : count;
  packet<T> sums[tile_rows][N];
  with_tile_height(rows, [&](auto M) {
    tile_product<T, M.value, N>(left_operand<T, 1, panel_width<T>>{a.at(std::min(first, count - 1), row)},
                                panel + first * wide, last - first,
                                [&](auto m, auto n, const auto& sum) { sums[m][n] = sum; });
  });
  for (index m = before ? 0 : rows - 1; before ? m < rows : m >= 0; m += before ? 1 : -1) {
    const index begin = before ? row : row + m + 1 - own, end = before ? row + m + own : row + rows;
    packet<T> sum[N];
    unroll<N>([&](auto n) { sum[n] = sums[m][n]; });
    for (index k = begin; k < end; ++k) {
      const packet<T> x = broadcast<T>(*a.at(k, row + m));
      unroll<N>([&](auto n) { sum[n] = fma(x, load<T>(panel + k * wide + n * width<T>), sum[n]); });
    }
    unroll<N>([&](auto n) { finish(row + m, n * width<T>, sum[n]); });
  }
}

/// finish(row, col, sum) takes the sum over the k of the triangle of a[k][row] b[k][col], for `count` rows, from first
/// to last or, of what is after a row, from last to first: where it writes that row of b, later rows sum what it wrote.
template <triangle Form, class T, class Finish>
void triangle_product(const panels<T>& a, index count, const panels<T>& b, index cols, Finish&& finish) {
  constexpr index wide = panel_width<T>, tiles = (wide + tile_rows - 1) / tile_rows;
  constexpr bool before = Form == triangle::before || Form == triangle::up_to;
  const index all = ceil_div(count, wide) * tiles;
  for (index col = 0; col < cols; col += wide)
    for (index n = 0; n < all; ++n) {
      const index tile = before ? n : all - 1 - n, row = tile / tiles * wide + tile % tiles * tile_rows;
      if (row >= count) continue;
      const index rows = std::min({index(tile_rows), wide - row % wide, count - row});
      const auto take = [&](index r, index c, const packet<T>& sum) { finish(r, col + c, sum); };
      if (col + width<T> < cols)
        triangle_tile<Form, 2>(a, row, rows, b.panel(col), count, take);
      else
        triangle_tile<Form, 1>(a, row, rows, b.panel(col), count, take);
    }
}

/// Sum over c < cols of a[row][c] b[row][c].
template <class T>
T dot_rows(const panels<T>& a, const panels<T>& b, index row, index cols) {
  packet<T> sums = zero<T>();
  index col = 0;
  for (; col + width<T> <= cols; col += width<T>) sums = fma(load<T>(a.at(row, col)), load<T>(b.at(row, col)), sums);
  T sum = sum_lanes(sums);
  for (; col < cols; ++col) sum += *a.at(row, col) * *b.at(row, col);
  return sum;
}

}  // namespace attn::inline ATTN_ISA::detail
