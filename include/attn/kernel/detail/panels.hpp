// attn: small matrices in panels, and products of them that can be chained.
//
// A matrix lies in panels of panel_width<T> columns, [rows][panel_width] each, so that it serves as right operand of a
// product and, by its columns, as left one: a product here is C = A^T B summed over the rows of A and B. A matrix that
// is needed in the other orientation is transposed once. Sums over a triangle read nothing outside it, not even
// multiplied by 0, so that NaN reaches only the rows that see it. They continue from the square tiles into the
// triangle, row by row, which also solves triangular systems.
#pragma once

#include <attn/core/detail/tile_product.hpp>
#include <attn/core/execution.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <class T>
struct panels {
  static constexpr idx_t wide = panel_width<T>;

  T* data = nullptr;
  idx_t capacity = 0;  // rows: tiles may reach beyond those in use

  [[gnu::noinline]] static panels layout(arena& memory, idx_t rows, idx_t cols) {
    const idx_t capacity = round_up(rows, wide);
    return {memory.allocate<T>(capacity * round_up(cols, wide)), capacity};
  }

  T* panel(idx_t col) const { return data + col / wide * capacity * wide; }
  T* at(idx_t row, idx_t col) const { return panel(col) + row * wide + col % wide; }
  /// The matrix without the rows before `row`; without the columns before `col`.
  panels from_row(idx_t row) const { return {data + row * wide, capacity}; }
  panels from_col(idx_t col) const { return {at(0, col), capacity}; }
};

/// Where results of products go: into rows and columns of `to`, or added to them.
template <class T>
auto write_to(const panels<T>& to) {
  return [to](idx_t row, idx_t col, const packet<T>& sum) { store<T>(to.at(row, col), sum); };
}
template <class T>
auto add_to(const panels<T>& to) {
  return [to](idx_t row, idx_t col, const packet<T>& sum) {
    store<T>(to.at(row, col), add(load<T>(to.at(row, col)), sum));
  };
}

/// f(row, col, packets...) for each packet of rows x cols in the matrices; f returns the new packet of the first one.
template <class T, class F, class... More>
ATTN_INLINE void each_packet(idx_t rows, idx_t cols, F&& f, const panels<T>& to, const More&... from) {
  constexpr idx_t wide = panels<T>::wide;
  const auto column = [&](idx_t col, T* out, const auto*... in) {
    for (idx_t row = 0; row < rows; ++row) store<T>(out + row * wide, f(row, col, load<T>(in + row * wide)...));
  };
  for (idx_t col = 0; col < cols; col += width<T>) column(col, to.at(0, col), from.at(0, col)...);
}

/// b = a^T, of rows x cols of a; `lower`: of its rows from the diagonal on.
template <class T>
void transpose_panels(const panels<T>& a, idx_t rows, idx_t cols, const panels<T>& b, bool lower = false) {
  constexpr idx_t wide = panels<T>::wide;
  for (idx_t col = 0; col < cols; col += width<T>)
    for (idx_t row = lower ? col : 0; row < rows; row += width<T>) {
      packet<T> square[width<T>];
      const T* const from = a.at(row, col);
      T* const to = b.at(col, row);
      for (int i = 0; i < width<T>; ++i) square[i] = load<T>(from + i * wide);
      transpose<T>(square);
      for (int i = 0; i < width<T>; ++i) store<T>(to + i * wide, square[i]);
    }
}

/// One tile of a product, `rows` <= tile_rows by one or two packets, into sums [tile_rows][panel_width]. Not inlined:
/// all products share it, at the cost of storing and loading the tile once more.
template <class T>
[[gnu::noinline]] void panel_tile(const T* a, idx_t rows, const T* panel, idx_t packets, idx_t depth, T* sums) {
  const auto tile = [&](auto M, auto N) {
    tile_product<T, M.value, N.value>(left_operand<T, 1, panel_width<T>>{a}, panel, depth,
                                      [&](auto m, auto n, const auto& sum) {
                                        store<T>(sums + m * panel_width<T> + n * width<T>, sum);
                                      });
  };
  with_tile_height(rows, [&](auto M) {
    if (packets == 2)
      tile(M, std::integral_constant<int, 2>{});
    else
      tile(M, std::integral_constant<int, 1>{});
  });
}

/// How many packets of the panel that begins at column col are in use.
template <class T>
idx_t packets_from(idx_t col, idx_t cols) {
  return col + width<T> < cols ? 2 : 1;
}

/// done(row, col, sum) takes the sum over k < depth of a[k][row] b[k][col] for every packet of columns < cols and every
/// row < rows.
template <class T, class Done>
void product(const panels<T>& a, idx_t rows, const panels<T>& b, idx_t cols, idx_t depth, Done&& done) {
  constexpr idx_t wide = panel_width<T>;
  alignas(64) T sums[tile_rows * panel_width<T>];
  for (idx_t col = 0; col < cols; col += wide)
    for (idx_t first = 0; first < rows; first += wide)
      for (idx_t row = first; row < (std::min)(first + wide, rows); row += tile_rows) {
        const idx_t some = std::min<idx_t>(tile_rows, (std::min)(first + wide, rows) - row);
        const idx_t packets = packets_from<T>(col, cols);
        panel_tile(a.at(0, row), some, b.panel(col), packets, depth, sums);
        for (idx_t m = 0; m < some; ++m)
          for (idx_t n = 0; n < packets; ++n)
            done(row + m, col + n * width<T>, load<T>(sums + m * wide + n * width<T>));
      }
}

/// The k a row of a triangle sums over: those before it, or those after it; with itself, or without.
enum class triangle { before, up_to, after, from };

/// finish(row, col, sum) takes the sum over the k of the triangle of a[k][row] b[k][col], for `count` rows, from first
/// to last or, of what is after a row, from last to first: if it writes that row of b, later rows sum the new values.
template <triangle Form, class T, class Finish>
void triangle_product(const panels<T>& a, idx_t count, const panels<T>& b, idx_t cols, Finish&& finish) {
  constexpr idx_t wide = panel_width<T>, tiles = (wide + tile_rows - 1) / tile_rows;
  constexpr bool before = Form == triangle::before || Form == triangle::up_to;
  constexpr idx_t own = Form == triangle::up_to || Form == triangle::from ? 1 : 0;
  const idx_t all = ceil_div(count, wide) * tiles;
  alignas(64) T sums[tile_rows * panel_width<T>];
  for (idx_t col = 0; col < cols; col += wide)
    for (idx_t n = 0; n < all; ++n) {
      const idx_t tile = before ? n : all - 1 - n, row = tile / tiles * wide + tile % tiles * tile_rows;
      if (row >= count) continue;
      const idx_t rows = (std::min)({idx_t(tile_rows), wide - row % wide, count - row});
      const idx_t first = before ? 0 : row + rows, last = before ? row : count, packets = packets_from<T>(col, cols);
      const idx_t second = (packets - 1) * width<T>;  // one packet is read twice: the next may belong to another thread
      panel_tile(a.at((std::min)(first, count - 1), row), rows, b.panel(col) + first * wide, packets, last - first,
                 sums);
      for (idx_t m = before ? 0 : rows - 1; before ? m < rows : m >= 0; m += before ? 1 : -1) {
        const idx_t begin = before ? row : row + m + 1 - own, end = before ? row + m + own : row + rows;
        packet<T> sum[2] = {load<T>(sums + m * wide), load<T>(sums + m * wide + width<T>)};
        for (idx_t k = begin; k < end; ++k) {
          const packet<T> x = broadcast<T>(*a.at(k, row + m));
          unroll<2>([&](auto half) { sum[half] = fma(x, load<T>(b.at(k, col) + half * second), sum[half]); });
        }
        unroll<2>([&](auto half) {  // so that the sums are in registers
          if (half < packets) finish(row + m, col + half * width<T>, sum[half]);
        });
      }
    }
}

/// Sum over c < cols of a[row][c] b[row][c].
template <class T>
T dot_rows(const panels<T>& a, const panels<T>& b, idx_t row, idx_t cols) {
  packet<T> sums = zero<T>();
  idx_t col = 0;
  for (; col + width<T> <= cols; col += width<T>) sums = fma(load<T>(a.at(row, col)), load<T>(b.at(row, col)), sums);
  T sum = sum_lanes(sums);
  for (; col < cols; ++col) sum += *a.at(row, col) * *b.at(row, col);
  return sum;
}

}}}  // namespace attn::ATTN_ISA::detail
