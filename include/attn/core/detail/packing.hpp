// attn: the packed forms that the operands of products take.
//
// A product C = A B takes B in panels: [k][panel_width], contiguous, padded. Operands P are the numbers themselves,
// float or double, or pairs of bf16 numbers (bf16_pair.hpp): two adjacent numbers along k are one operand, so that
// there are half as many operands, rounded up. For precision::fast two adjacent floats are three operands
// (split_pair.hpp).
//
//   1. pack_panels         rows of a matrix become k:        B = X      (X [k, n], e.g. values)
//   2. pack_panels_across  rows of a matrix become columns:  B = X^T    (X [n, k], e.g. keys)
//   3. pack_rows           the A operand as [k][tile_rows]
//   4. pack_row_chunks     the A operand as [k / chunk][tile_rows][chunk], without a transposition   (queries)
#pragma once

#include <attn/core/detail/amx.hpp>
#include <attn/core/detail/bf16_pair.hpp>
#include <attn/core/detail/pages.hpp>
#include <attn/core/detail/split_pair.hpp>

#include <algorithm>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Rows of the largest tile, two vectors each:
///
///   registers  build             tile    accumulate  of the peak reached (full_softmax, 4096 tokens, Zen 4)
///   32         AVX-512, AArch64  12 x 2  24          0.86
///   16         AVX2, SSE         6 x 2   12          0.82
inline constexpr int tile_rows = registers >= 32 ? 12 : 6;
/// Tiles come in these heights; a remainder of rows is padded to the next.
inline constexpr int tile_step = tile_rows / 3;

/// Columns of a panel: two vectors.
template <class T>
inline constexpr int panel_width = 2 * width<T>;

constexpr idx_t round_up(idx_t n, idx_t step) { return (n + step - 1) / step * step; }
constexpr idx_t floor_div(idx_t n, idx_t d) { return n / d - (n % d < 0); }
constexpr idx_t ceil_div(idx_t n, idx_t d) { return -floor_div(-n, d); }

/// `count` elements from p on, `stride` apart, converted to T or to pairs; zeros after them. Not inlined: this is the
/// slow path.
template <class T, class S>
[[gnu::noinline]] packet<T> gather_part(const S* p, idx_t stride, idx_t count) {
  if constexpr (std::same_as<T, S>)
    if (stride == 1 && count < width<T>) return load_first<T>(p, std::max<idx_t>(count, 0));
  alignas(64) T lanes[width<T>] = {};
  const idx_t n = std::min<idx_t>(count, numbers_of<T> * width<T>);
  if constexpr (numbers_of<T> == 1)
    for (idx_t i = 0; i < n; ++i) lanes[i] = static_cast<T>(p[i * stride]);
  else
    for (idx_t i = 0; i < n; i += 2) lanes[i / 2] = make_pair(p[i * stride], i + 1 < n ? p[(i + 1) * stride] : S(0));
  return load<T>(lanes);
}

/// A packet of `count` elements from p on, converted to T or to pairs; zeros after them.
template <class T, class S>
ATTN_INLINE packet<T> load_part(const S* p, idx_t stride, idx_t count) {
  if (stride != 1 || count < numbers_of<T> * width<T>) return gather_part<T>(p, stride, count);
  if constexpr (numbers_of<T> == 1) {
    return load_as<T>(p);
  } else {
    const half_lanes part[] = {load_bf16(p), load_bf16(p + width<T>)};
    packet<T> x;
    std::memcpy(&x, part, sizeof x);
    return x;
  }
}

/// Pointers to width<T> rows of X from row r0 on; the last row is repeated for those beyond it.
template <class T, class S>
struct row_pointers {
  const S* at[width<T>];

  template <class Row>
  row_pointers(Row&& row, idx_t r0, idx_t rows) {
    for (int i = 0; i < width<T>; ++i) at[i] = row((std::min)(r0 + i, rows - 1));
  }
};

/// width x width operands of X^T: lane i of packet j is operand j of row i from column c0 on, 0 beyond the last column.
template <class T, class S>
ATTN_INLINE void load_across(packet<T> (&square)[width<T>], const row_pointers<T, S>& rows, idx_t c0, idx_t cols,
                             idx_t stride) {
  if (stride == 1 && c0 + numbers_of<T> * width<T> <= cols)
    unroll<width<T>>([&](auto i) { square[i] = load_part<T>(rows.at[i] + c0, 1, numbers_of<T> * width<T>); });
  else
    for (int i = 0; i < width<T>; ++i) square[i] = gather_part<T>(rows.at[i] + c0 * stride, stride, cols - c0);
  transpose<sum_type<T>>(square);
}

/// Operands of width<T> rows of X as [col][Stride], numbers times `factor`. Not inlined: one copy serves all callers.
template <class T, int Stride, class S>
[[gnu::noinline]] void pack_across(const row_pointers<T, S>& rows, idx_t cols, idx_t col_stride,
                                   [[maybe_unused]] sum_type<T> factor, T* to) {
  constexpr int w = width<T>;
  const auto put = [&](T* p, const packet<T>& x) {
    if constexpr (numbers_of<T> == 1)
      store<T>(p, mul(x, broadcast<T>(factor)));
    else
      store<T>(p, x);
  };
  constexpr bool overlaps = Stride < w;  // packets the next column, but for the last
  const idx_t depth = operands<T>(cols);
  for (idx_t c = 0; c < depth; c += w, to += w * Stride) {
    packet<T> square[array_size<w>];
    load_across(square, rows, c * numbers_of<T>, cols, col_stride);
    if (c + w <= depth - overlaps) {
      unroll<w>([&](auto j) { put(to + j * Stride, square[j]); });
    } else {
      for (int j = 0; j < depth - c - overlaps; ++j) put(to + j * Stride, square[j]);
      if constexpr (overlaps) {
        T last[array_size<w>];
        put(last, square[depth - c - 1]);
        std::copy_n(last, Stride, to + (depth - c - 1) * Stride);
      }
    }
  }
}

/// The same of floats in two parts, as the right side of products.
template <class T, int Stride, class S>
[[gnu::noinline]] void pack_split_across(const row_pointers<T, S>& rows, idx_t cols, idx_t col_stride, T* to) {
  constexpr int w = width<T>;
  for (idx_t c = 0; c < cols; c += 2 * w, to += 3 * w * Stride) {
    const auto part = [&](int i, idx_t begin) {
      return load_part<float>(rows.at[i] + (std::min)(begin, cols) * col_stride, col_stride, cols - begin);
    };
    packet<T> high[array_size<w>], low[array_size<w>];
    for (int i = 0; i < w; ++i) {
      const split_neighbours x(part(i, c), part(i, c + w));
      high[i] = x.high, low[i] = x.low;
    }
    transpose<float>(high), transpose<float>(low);
    for (int j = 0; j < w && c + 2 * j < cols; ++j) {
      store<T>(to + (3 * j) * Stride, high[j]);
      store<T>(to + (3 * j + 1) * Stride, low[j]);
      store<T>(to + (3 * j + 2) * Stride, high[j]);
    }
  }
}

/// Packs rows [0, rows) of X as the columns of panels: panel p holds rows p * panel_width ..., as [col][panel_width],
/// and repeats the last row to fill the last `unit` of columns, a vector or a panel. Takes
/// round_up(rows, panel_width) * cols operands.
template <class T, class Row>
void pack_panels_across(Row&& row, idx_t rows, idx_t cols, idx_t col_stride, T* panels, idx_t unit = panel_width<T>) {
  using S = std::remove_cvref_t<decltype(*row(0))>;
  constexpr int wide = panel_width<T>;
  for (idx_t r = 0; r < rows; r += wide, panels += operands<T>(cols) * wide)
    for (idx_t half = 0; half < std::min<idx_t>(wide, round_up(rows - r, unit)); half += width<T>) {
      const row_pointers<T, S> some(row, (std::min)(r + half, rows - 1), rows);
      if constexpr (is_split<T>)
        pack_split_across<T, wide>(some, cols, col_stride, panels + half);
      else
        pack_across<T, wide>(some, cols, col_stride, sum_type<T>(1), panels + half);
    }
}

/// Packs rows [first, first + rows) of X into panels [capacity][panel_width] whose rows are X's: panel p holds columns
/// p * panel_width ... of all rows. `panels` takes capacity * round_up(cols, panel_width) elements. Returns whether
/// every packed number is finite. In panels of pairs two rows of X become one; first and capacity are even, and an odd
/// last row is paired with zeros.
template <class T, class Row>
bool pack_panels(Row&& row, idx_t first, idx_t rows, idx_t cols, idx_t col_stride, T* panels, idx_t capacity) {
  constexpr int w = width<T>, wide = panel_width<T>, together = numbers_of<T>;
  using sum = sum_type<T>;
  packet<sum> trace = zero<sum>();  // 0 * x is NaN for an x that is not finite, and stays
  word_lanes infinite{};
  const idx_t whole = col_stride == 1 ? cols / w * w : 0, length = operands<T>(capacity);
  for (idx_t r = first; r < first + rows; r += together) {
    const auto* x = row(r);
    const auto put = [&](idx_t c, const packet<T>& part, idx_t more = 0) {
      store<T>(panels + (c / wide) * length * wide + (operands<T>(r) + more) * wide + c % wide, part);
    };
    if constexpr (together == 1) {
      const auto put_finite = [&](idx_t c, const packet<T>& part) {
        trace = fma(part, zero<T>(), trace);
        put(c, part);
      };
      for (idx_t c = 0; c < whole; c += w) put_finite(c, load_as<T>(x + c));
      for (idx_t c = whole; c < cols; c += w) put_finite(c, load_part<T>(x + c * col_stride, col_stride, cols - c));
    } else {
      const bool both = r + 1 < first + rows;
      const auto* y = both ? row(r + 1) : x;
      idx_t col = 0;
      if constexpr (std::same_as<T, bf16_pair> && std::same_as<std::remove_cvref_t<decltype(*x)>, Eigen::bfloat16>) {
        for (; col < whole; col += w) {
          const packet<T> pairs = pair_lanes(load_bf16(x + col), both ? load_bf16(y + col) : half_lanes{});
          // An exponent of ones, plus one, is carried into the place of the sign.
          infinite |= (bits_as<word_lanes>(pairs) & 0x7f807f80u) + 0x00800080u;
          put(col, pairs);
        }
      }
      const auto put_both = [&](idx_t c, const packet<sum>& a, const packet<sum>& b) {
        if constexpr (is_split<T>) {
          const split_parts upper(a), lower(both ? b : zero<sum>());
          trace = fma(upper.rest, zero<sum>(), fma(lower.rest, zero<sum>(), trace));
          const packet<T> high = pair_lanes(upper.high, lower.high);
          put(c, high), put(c, pair_lanes(upper.low, lower.low), 1), put(c, high, 2);
        } else {
          trace = fma(a, zero<sum>(), fma(b, zero<sum>(), trace));
          put(c, pair_lanes(to_bf16(a), both ? to_bf16(b) : half_lanes{}));
        }
      };
      for (; col < whole; col += w) put_both(col, load_as<sum>(x + col), load_as<sum>(y + col));
      for (idx_t c = whole; c < cols; c += w)
        put_both(c, load_part<sum>(x + c * col_stride, col_stride, cols - c),
                 load_part<sum>(y + c * col_stride, col_stride, cols - c));
    }
  }
  std::uint32_t signs = 0;
  for (int lane = 0; lane < width<float>; ++lane) signs |= infinite[lane] & 0x80008000u;
  return sum_lanes(trace) == sum(0) && signs == 0;
}

/// Whether the left operand is packed for the matrix unit: row by row, unit_pairs at a time.
template <class P>
inline constexpr bool rows_for_matrix_unit = numbers_of<P> > 1 && matrix_unit_compiled;

/// Columns of a chunk: those of a cache line, at least a vector, as the matrix unit takes them.
template <class P>
inline constexpr idx_t chunk_columns = idx_t(cache_line / sizeof(P));
/// Number of operands of a row of n numbers in chunks.
template <class P>
constexpr idx_t row_chunk_operands(idx_t n) {
  return round_up(operands<P>(n), chunk_columns<P>);
}

/// Number of operands of a packed row of n numbers.
template <class P>
constexpr idx_t row_operands(idx_t n) {
  return rows_for_matrix_unit<P> ? row_chunk_operands<P>(n) : operands<P>(n);
}

/// Packs `rows` <= tile_rows rows as [col / chunk][tile_rows][chunk], each number times `factor`, which for pairs is 1;
/// the last row is repeated to fill a tile height, for the matrix unit the tile, and zeros fill the last vector.
/// Takes tile_rows * row_chunk_operands(cols) operands, and nothing beyond them is written: other threads may pack what
/// follows.
template <class T, class Row>
void pack_row_chunks(Row&& row, idx_t rows, idx_t cols, idx_t col_stride, [[maybe_unused]] sum_type<T> factor,
                     T* packed) {
  using S = std::remove_cvref_t<decltype(*row(0))>;
  constexpr idx_t step = width<T>, chunk = chunk_columns<T>;
  static_assert(step <= chunk);
  const idx_t length = round_up(operands<T>(cols), step);
  const idx_t height = rows_for_matrix_unit<T> ? tile_rows : round_up(rows, tile_step);
  for (idx_t r = 0; r < height; ++r) {
    const S* const from = row((std::min)(r, rows - 1));
    T* const to = packed + r * chunk;
#if ATTN_HAS_AMX
    if constexpr (is_split<T>) {
      const auto part = [&](idx_t col) {
        return load_part<float>(from + (std::min)(col, cols) * col_stride, col_stride, std::max<idx_t>(cols - col, 0));
      };
      for (idx_t k = 0, col = 0; k < length; k += 3 * step, col += 2 * step) {
        T parts[array_size<3 * step>];
        split_neighbours(part(col), part(col + step)).store_left(parts);
        for (idx_t n = k; n < (std::min)(k + 3 * step, length); n += step)
          store<T>(to + n * tile_rows, load<T>(parts + (n - k)));
      }
    }
#endif
    if constexpr (!is_split<T>)
      for (idx_t k = 0; k < length; k += step) {
        const idx_t col = numbers_of<T> * k;
        const packet<T> x = load_part<T>(from + col * col_stride, col_stride, cols - col);
        T* const at = to + k / chunk * chunk * tile_rows + k % chunk;
        if constexpr (numbers_of<T> == 1)
          store<T>(at, mul(x, broadcast<T>(factor)));
        else
          store<T>(at, x);
      }
  }
}

/// Packs `rows` <= tile_rows rows as [col][tile_rows], each number times `factor`, which for pairs is 1; the last row
/// is repeated to fill the tile. Takes tile_rows * row_operands(cols) operands, and nothing beyond them is written:
/// other threads may pack what follows. For the matrix unit in chunks.
template <class T, class Row>
void pack_rows(Row&& row, idx_t rows, idx_t cols, idx_t col_stride, sum_type<T> factor, T* packed) {
  using S = std::remove_cvref_t<decltype(*row(0))>;
  if constexpr (rows_for_matrix_unit<T>)
    pack_row_chunks(row, rows, cols, col_stride, factor, packed);
  else
    for (int r = 0; r < tile_rows; r += width<T>) {  // packets overlap the one before where w does not divide tile_rows
      const int r0 = r > 0 ? (std::min)(r, tile_rows - width<T>) : 0;
      pack_across<T, tile_rows>(row_pointers<T, S>(row, r0, rows), cols, col_stride, factor, packed + r0);
    }
}

}}}  // namespace attn::ATTN_ISA::detail
