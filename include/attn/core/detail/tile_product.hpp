// attn: the register-blocked product every operator's cost goes into, and the packed form its operands take.
//
//   C[m, n] = sum over k of A[m, k] * B[k, n]
//
// One tile of C, tile_rows x panel_width<T>, stays in registers while k runs: per step two vectors of B are loaded and
// tile_rows numbers of A broadcast, so nearly every instruction is a multiply-add. B comes in panels: [k][panel_width],
// contiguous, padded. Every element of C is one chain of multiply-adds in the order of k, whatever the tile,
// so results do not depend, to the last bit, on how rows and columns fall into tiles.
//
// Operands P are the numbers themselves, float or double, or pairs of bf16 numbers (bf16_pair.hpp): two neighbours along
// k, whose number is then half as large, rounded up. For precision::fast two neighbours are three (split_pair.hpp).
//
//   1. pack_panels         rows of a matrix become k:        B = X      (X [k, n], e.g. values)
//   2. pack_panels_across  rows of a matrix become columns:  B = X^T    (X [n, k], e.g. keys)
//   3. pack_rows           the A operand as [k][tile_rows]   (queries)
//   4. tile_product        one tile
#pragma once

#include <attn/core/detail/amx.hpp>
#include <attn/core/detail/bf16_pair.hpp>
#include <attn/core/detail/split_pair.hpp>

#include <algorithm>

namespace attn::inline ATTN_ISA::detail {

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

constexpr index round_up(index n, index step) { return (n + step - 1) / step * step; }
constexpr index floor_div(index n, index d) { return n / d - (n % d < 0); }
constexpr index ceil_div(index n, index d) { return -floor_div(-n, d); }

// Packing -------------------------------------------------------------------------------------------------------------

/// `count` elements from p on, `stride` apart, converted to T or made pairs of; zeros after them. Kept out of line: the
/// slow way.
template <class T, class S>
[[gnu::noinline]] packet<T> gather_part(const S* p, index stride, index count) {
  alignas(64) T lanes[width<T>] = {};
  const index n = std::min<index>(count, numbers_of<T> * width<T>);
  if constexpr (numbers_of<T> == 1)
    for (index i = 0; i < n; ++i) lanes[i] = static_cast<T>(p[i * stride]);
  else
    for (index i = 0; i < n; i += 2) lanes[i / 2] = make_pair(p[i * stride], i + 1 < n ? p[(i + 1) * stride] : S(0));
  return load<T>(lanes);
}

/// A packet of `count` elements from p on, converted to T or made pairs of; zeros after them.
template <class T, class S>
ATTN_INLINE packet<T> load_part(const S* p, index stride, index count) {
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

/// Pointers to width<T> rows of X from row r0 on; the last row stands in for those beyond it.
template <class T, class S>
struct row_pointers {
  const S* at[width<T>];

  template <class Row>
  row_pointers(Row&& row, index r0, index rows) {
    for (int i = 0; i < width<T>; ++i) at[i] = row(std::min(r0 + i, rows - 1));
  }
};

/// width x width operands of X^T: lane i of packet j is of element c0 + j numbers of row i, 0 beyond the last column.
template <class T, class S>
ATTN_INLINE void load_across(packet<T> (&square)[width<T>], const row_pointers<T, S>& rows, index c0, index cols,
                             index stride) {
  if (stride == 1 && c0 + numbers_of<T> * width<T> <= cols)
    unroll<width<T>>([&](auto i) { square[i] = load_part<T>(rows.at[i] + c0, 1, numbers_of<T> * width<T>); });
  else
    for (int i = 0; i < width<T>; ++i) square[i] = gather_part<T>(rows.at[i] + c0 * stride, stride, cols - c0);
  transpose<sum_type<T>>(square);
}

/// Operands of width<T> rows of X as [col][Stride], numbers times `factor`. Out of line: one copy for all that calls it.
template <class T, int Stride, class S>
[[gnu::noinline]] void pack_across(const row_pointers<T, S>& rows, index cols, index col_stride,
                                   [[maybe_unused]] sum_type<T> factor, T* to) {
  constexpr int w = width<T>;
  const auto put = [&](T* p, const packet<T>& x) {
    if constexpr (numbers_of<T> == 1)
      store<T>(p, mul(x, broadcast<T>(factor)));
    else
      store<T>(p, x);
  };
  const index depth = operands<T>(cols);
  for (index c = 0; c < depth; c += w, to += w * Stride) {
    packet<T> square[w];
    load_across(square, rows, c * numbers_of<T>, cols, col_stride);
    if (c + w <= depth)
      unroll<w>([&](auto j) { put(to + j * Stride, square[j]); });
    else
      for (int j = 0; j < depth - c; ++j) put(to + j * Stride, square[j]);
  }
}

/// The same of floats in two parts, as the right side of products.
template <class T, int Stride, class S>
[[gnu::noinline]] void pack_split_across(const row_pointers<T, S>& rows, index cols, index col_stride, T* to) {
  constexpr int w = width<T>;
  for (index c = 0; c < cols; c += 2 * w, to += 3 * w * Stride) {
    const auto part = [&](int i, index begin) {
      return load_part<float>(rows.at[i] + std::min(begin, cols) * col_stride, col_stride, cols - begin);
    };
    packet<T> high[w], low[w];
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
/// the last row again to fill it. Takes round_up(rows, panel_width) * cols operands.
template <class T, class Row>
void pack_panels_across(Row&& row, index rows, index cols, index col_stride, T* panels) {
  using S = std::remove_cvref_t<decltype(*row(0))>;
  constexpr int wide = panel_width<T>;
  for (index r = 0; r < rows; r += wide, panels += operands<T>(cols) * wide)
    for (int half = 0; half < wide; half += width<T>) {
      const row_pointers<T, S> some(row, std::min(r + half, rows - 1), rows);
      if constexpr (is_split<T>)
        pack_split_across<T, wide>(some, cols, col_stride, panels + half);
      else
        pack_across<T, wide>(some, cols, col_stride, sum_type<T>(1), panels + half);
    }
}

/// Packs rows [first, first + rows) of X into panels [capacity][panel_width] whose rows are X's: panel p holds columns
/// p * panel_width ... of all rows. `panels` takes capacity * round_up(cols, panel_width) elements. Tells whether every
/// number packed is finite. In panels of pairs two rows of X are one; first and capacity are even, and a row of zeros
/// goes with an odd last one.
template <class T, class Row>
bool pack_panels(Row&& row, index first, index rows, index cols, index col_stride, T* panels, index capacity) {
  constexpr int w = width<T>, wide = panel_width<T>, together = numbers_of<T>;
  using sum = sum_type<T>;
  packet<sum> trace = zero<sum>();  // 0 * x is NaN for an x that is not finite, and stays
  const index whole = col_stride == 1 ? cols / w * w : 0, length = operands<T>(capacity);
  for (index r = first; r < first + rows; r += together) {
    const auto* x = row(r);
    const auto put = [&](index c, const packet<T>& part, index more = 0) {
      store<T>(panels + (c / wide) * length * wide + (operands<T>(r) + more) * wide + c % wide, part);
    };
    if constexpr (together == 1) {
      const auto put_finite = [&](index c, const packet<T>& part) {
        trace = fma(part, zero<T>(), trace);
        put(c, part);
      };
      for (index c = 0; c < whole; c += w) put_finite(c, load_as<T>(x + c));
      for (index c = whole; c < cols; c += w) put_finite(c, load_part<T>(x + c * col_stride, col_stride, cols - c));
    } else {
      const bool both = r + 1 < first + rows;
      const auto* y = both ? row(r + 1) : x;
      const auto put_both = [&](index c, const packet<sum>& a, const packet<sum>& b) {
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
      for (index c = 0; c < whole; c += w) put_both(c, load_as<sum>(x + c), load_as<sum>(y + c));
      for (index c = whole; c < cols; c += w)
        put_both(c, load_part<sum>(x + c * col_stride, col_stride, cols - c),
                 load_part<sum>(y + c * col_stride, col_stride, cols - c));
    }
  }
  return sum_lanes(trace) == sum(0);
}

/// Is the left operand packed for the matrix unit: row by row, unit_pairs at a time?
template <class P>
inline constexpr bool rows_for_matrix_unit = numbers_of<P> > 1 && matrix_unit_compiled;

/// Operands of a packed row of n numbers.
template <class P>
constexpr index row_operands(index n) {
#if ATTN_HAS_AMX
  if constexpr (rows_for_matrix_unit<P>) return round_up(operands<P>(n), unit_pairs);
#endif
  return operands<P>(n);
}

/// Packs `rows` <= tile_rows rows as [col][tile_rows], each number times `factor`, which for pairs is 1; the last row
/// fills up. Takes tile_rows * row_operands(cols) operands and writes up to width<T> beyond them. For the matrix unit as
/// [col / unit_pairs][tile_rows][unit_pairs], with zeros after the last column.
template <class T, class Row>
void pack_rows(Row&& row, index rows, index cols, index col_stride, sum_type<T> factor, T* packed) {
  using S = std::remove_cvref_t<decltype(*row(0))>;
#if ATTN_HAS_AMX
  if constexpr (rows_for_matrix_unit<T>) {
    constexpr index step = width<T>;
    static_assert(step == unit_pairs);
    const index length = row_operands<T>(cols);
    for (index r = 0; r < tile_rows; ++r) {
      const S* const from = row(std::min(r, rows - 1));
      T* const to = packed + r * unit_pairs;
      const auto part = [&](auto type, index col) {
        return load_part<typename decltype(type)::type>(from + std::min(col, cols) * col_stride, col_stride,
                                                        std::max<index>(cols - col, 0));
      };
      if constexpr (is_split<T>) {
        for (index k = 0, col = 0; k < length; k += 3 * step, col += 2 * step) {
          T parts[3 * step];
          split_neighbours(part(std::type_identity<float>(), col), part(std::type_identity<float>(), col + step))
              .store_left(parts);
          for (index n = k; n < std::min(k + 3 * step, length); n += step)
            store<T>(to + n * tile_rows, load<T>(parts + n - k));
        }
      } else {
        for (index k = 0; k < length; k += step) store<T>(to + k * tile_rows, part(std::type_identity<T>(), 2 * k));
      }
    }
  }
#endif
  // Packets overlap the next column where tile_rows < w, and the packet before where w does not divide tile_rows.
  if constexpr (!rows_for_matrix_unit<T>)
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

/// What pack_rows packs.
template <class T>
struct packed_rows {
  const T* data;
  ATTN_INLINE T at(int m, index k) const {
#if ATTN_HAS_AMX
    if constexpr (rows_for_matrix_unit<T>)
      return data[k / unit_pairs * unit_pairs * tile_rows + m * unit_pairs + k % unit_pairs];
#endif
    return data[m + k * tile_rows];
  }
};

#if ATTN_HAS_AMX
/// Rows of a left operand as the matrix unit takes them, pairs [k, k + unit_pairs) of each: in place, or in `buffer`.
template <class T>
struct unit_operand {
  const T* rows;
  index stride;
};
template <class T>
unit_operand<T> rows_for_unit(const packed_rows<T>& a, index k, T*) {
  return {a.data + k * tile_rows, unit_pairs};
}
template <class T, int RowStride>
unit_operand<T> rows_for_unit(const left_operand<T, RowStride, 1>& a, index k, T*) {
  return {a.data + k, RowStride};
}
template <class T, class A>
unit_operand<T> rows_for_unit(const A& a, index k, T* buffer) {
  for (index n = 0; n < unit_pairs; ++n)
    for (int m = 0; m < unit_rows; ++m) buffer[m * unit_pairs + n] = a.at(m, k + n);
  return {buffer, unit_pairs};
}

/// The sums over the first `depth` pairs, a multiple of unit_pairs, for unit_rows rows and N packets, [row][2 packets].
/// Two sums take turns, for a product takes as long as three such steps. `panel` has rows of Stride pairs.
template <int N, int Stride, class T, class A>
void unit_product(const A& a, const T* panel, index depth, float* sums) {
  constexpr index row_bytes = 2 * unit_columns * sizeof(float), panel_bytes = Stride * sizeof(T);
  alignas(64) T buffer[unit_rows * unit_pairs];
  const auto step = [&](index k, auto first) {
    const unit_operand<T> rows = rows_for_unit(a, k, buffer);
    amx::load<4>(rows.rows, rows.stride * static_cast<index>(sizeof(T)));
    amx::load<5>(panel + k * Stride, panel_bytes);
    amx::multiply_add<first.value, 4, 5>();
    if constexpr (N > 1) {
      amx::load<6>(panel + k * Stride + unit_columns, panel_bytes);
      amx::multiply_add<first.value + 1, 4, 6>();
    }
  };
  const bool both = depth > unit_pairs;
  amx::clear<0>(), amx::clear<1>();
  if (both) amx::clear<2>(), amx::clear<3>();
  for (index k = 0; k < depth; k += 2 * unit_pairs) {
    step(k, std::integral_constant<int, 0>{});
    if (k + unit_pairs < depth) step(k + unit_pairs, std::integral_constant<int, 2>{});
  }
  alignas(64) float others[unit_rows * 2 * unit_columns];
  amx::store<0>(sums, row_bytes);
  if constexpr (N > 1) amx::store<1>(sums + unit_columns, row_bytes);
  if (!both) return;
  amx::store<2>(others, row_bytes);
  if constexpr (N > 1) amx::store<3>(others + unit_columns, row_bytes);
  for (int n = 0; n < unit_rows * 2 * unit_columns; n += width<float>)
    store<float>(sums + n, add(load<float>(sums + n), load<float>(others + n)));
}
#endif

/// acc[m][n] = sum over k < depth of a(m, k) * panel[k][n] for M rows and N vectors; done(m, n, sum) takes each result.
/// The rows of the panel lie Stride numbers apart.
template <class T, int M, int N, int Stride = panel_width<T>, class A, class Done>
ATTN_INLINE void tile_product(A a, const T* panel, index depth, Done&& done) {
  packet<sum_type<T>> acc[M][N];
  unroll<M>([&](auto m) { unroll<N>([&](auto n) { acc[m][n] = zero<sum_type<T>>(); }); });
  index begin = 0;
#if ATTN_HAS_AMX
  if constexpr (rows_for_matrix_unit<T>)
    if (const index whole = depth / unit_pairs * unit_pairs; whole > 0 && prepare_matrix_unit()) {
      static_assert(width<float> == unit_columns && M <= unit_rows);
      alignas(64) float sums[unit_rows * 2 * unit_columns];
      unit_product<N, Stride>(a, panel, whole, sums);
      unroll<M>([&](auto m) {
        unroll<N>([&](auto n) { acc[m][n] = load<float>(sums + (2 * m + n) * unit_columns); });
      });
      begin = whole;
    }
#endif
  for (index k = begin; k < depth; ++k) {
    packet<T> b[N];
    unroll<N>([&](auto n) { b[n] = load<T>(panel + k * Stride + n * width<T>); });
    unroll<M>([&](auto m) {
      const packet<T> x = broadcast<T>(a.at(m, k));
      unroll<N>([&](auto n) { acc[m][n] = multiply_add<T>(x, b[n], acc[m][n]); });
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

/// take(m, half, sum) takes row m < rows of a product, one or two packets of a panel, with the numbers left out that
/// seen(m, k), a mask of pair k, has not. The sums are those of tile_product, to the last bit. Depth: the most there is.
template <index Depth, class T, class Left, class Seen, class Take>
[[gnu::noinline]] void seen_product(const Left& left, index rows, const T* panel, index packets, index depth,
                                    const Seen& seen, Take&& take) {
  constexpr index wide = panel_width<T>;
  alignas(64) T part[Depth * wide];
  for (index m = 0; m < rows; ++m) {
    for (index k = 0; k < depth; ++k) {
      const std::uint32_t mask = seen(m, k);
      for (index at = k * wide; at < k * wide + packets * width<float>; ++at) part[at] = {panel[at].bits & mask};
    }
    const auto of_row = [&](auto row, auto half, const auto& x) {
      if (row == m) take(m, half, x);
    };
    with_tile_height(rows, [&](auto M) {
      if (packets == 2)
        tile_product<T, M.value, 2>(left, part, depth, of_row);
      else
        tile_product<T, M.value, 1>(left, part, depth, of_row);
    });
  }
}

}  // namespace attn::detail
