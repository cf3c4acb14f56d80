// attn: products on the matrix unit, step by step, and the left operands that they and tile_product take.
#pragma once

#include <attn/core/detail/packing.hpp>
#include <attn/core/detail/pages.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The A operand: where element (m, k) lies. Both strides are compile-time constants.
template <class T, int RowStride, int DepthStride>
struct left_operand {
  const T* data;
  ATTN_INLINE T at(int m, idx_t k) const { return data[m * RowStride + k * DepthStride]; }
};

/// What pack_rows packs.
template <class T>
struct packed_rows {
  const T* data;
  ATTN_INLINE T at(int m, idx_t k) const {
#if ATTN_HAS_AMX
    if constexpr (rows_for_matrix_unit<T>)
      return data[k / unit_pairs * unit_pairs * tile_rows + m * unit_pairs + k % unit_pairs];
#endif
    return data[m + k * tile_rows];
  }
};

/// What pack_row_chunks packs.
template <class T>
struct row_chunks {
  const T* data;
  ATTN_INLINE T at(int m, idx_t k) const {
    constexpr idx_t chunk = chunk_columns<T>;
    return data[k / chunk * chunk * tile_rows + m * chunk + k % chunk];
  }
};

/// Cache lines of adjacent rows.
struct prefetched_lines {
  const char* first = nullptr;
  idx_t count = 0, stride = 0, in_row = 0;  // lines; bytes from row to row; the lines of a row less one
  int shift = 0;                            // 2^shift lines of a row

  /// Fetches those of lines [begin, end) that there are.
  ATTN_INLINE void fetch(idx_t begin, idx_t end) const {
    for (end = (std::min)(end, count); begin < end; ++begin)
      __builtin_prefetch(first + (begin >> shift) * stride + (begin & in_row) * idx_t(cache_line), 0, 2);
  }
};

/// Packed rows whose products fetch lines of memory as they go, a few steps' at a time: with 16 registers fetching with
/// every step takes longer than the products (full_softmax, 256 tokens, AVX2: 1.1 of the time).
template <class T, class Rows = packed_rows<T>>
struct prefetching_rows : Rows {
  prefetched_lines lines[2];
  ATTN_INLINE void fetch(idx_t begin, idx_t end) const { lines[0].fetch(begin, end), lines[1].fetch(begin, end); }
};

/// Columns of a left operand that a product takes at a time, or 0 for all.
template <class A>
inline constexpr idx_t chunk_of = 0;
template <class T>
inline constexpr idx_t chunk_of<row_chunks<T>> = chunk_columns<T>;
template <class T, class Rows>
inline constexpr idx_t chunk_of<prefetching_rows<T, Rows>> = registers >= 32 ? 4 : chunk_columns<T>;

/// The left operand of the columns of the chunk that column k is in, at constant strides.
template <class T, class A>
ATTN_INLINE auto left_from(const A& a, [[maybe_unused]] idx_t k) {
  if constexpr (constexpr idx_t chunk = chunk_columns<T>; std::derived_from<A, row_chunks<T>>)
    return left_operand<T, int(chunk), 1>{a.data + k / chunk * chunk * (tile_rows - 1)};  // column k: k * tile_rows on
  else
    return a;
}

#if ATTN_HAS_AMX
/// Rows of a left operand as the matrix unit takes them, pairs [k, k + unit_pairs) of each: in place, or in `buffer`.
template <class T>
struct unit_operand {
  const T* rows;
  idx_t stride;
};
template <class T>
unit_operand<T> rows_for_unit(const packed_rows<T>& a, idx_t k, T*) {
  return {a.data + k * tile_rows, unit_pairs};
}
template <class T>
unit_operand<T> rows_for_unit(const row_chunks<T>& a, idx_t k, T*) {
  return {a.data + k * tile_rows, unit_pairs};
}
template <class T, int RowStride>
unit_operand<T> rows_for_unit(const left_operand<T, RowStride, 1>& a, idx_t k, T*) {
  return {a.data + k, RowStride};
}
template <class T, int DepthStride>
unit_operand<T> rows_for_unit(const left_operand<T, 1, DepthStride>& a, idx_t k, T* buffer) {
  static_assert(width<T> == unit_pairs);
  constexpr std::uint32_t used = (1u << unit_rows) - 1;
  packet<T> square[unit_pairs];
  unroll<unit_pairs>([&](auto n) { square[n] = _mm512_maskz_loadu_ps(used, a.data + (k + n) * DepthStride); });
  transpose<float>(square);
  unroll<unit_rows>([&](auto m) { store<T>(buffer + m * unit_pairs, square[m]); });
  return {buffer, unit_pairs};
}
template <class T, class A>
unit_operand<T> rows_for_unit(const A& a, idx_t k, T* buffer) {
  for (idx_t n = 0; n < unit_pairs; ++n)
    for (int m = 0; m < unit_rows; ++m) buffer[m * unit_pairs + n] = a.at(m, k + n);
  return {buffer, unit_pairs};
}

/// sums [row][row_sums], N packets of each of unit_rows rows: call begin, then a step for every unit_pairs pairs, then
/// end. Rows of a panel have Stride pairs; the third and fourth packet are those of the panel that begins `next` pairs
/// later. Nothing else may use the unit between the steps.
template <int N, int Stride, class T, class A>
struct unit_product {
  A a;
  const T* panel;
  idx_t next;

  static void begin() {
    amx::clear<0>();
    if constexpr (N > 1) amx::clear<1>();
    if constexpr (N > 2) amx::clear<2>(), amx::clear<3>();
  }
  void step(idx_t k) const {
    constexpr idx_t panel_bytes = Stride * sizeof(T);
    alignas(64) T buffer[unit_rows * unit_pairs];
    const unit_operand<T> rows = rows_for_unit(a, k, buffer);
    const T* const b = panel + k * Stride;
    amx::load<4>(rows.rows, rows.stride * static_cast<idx_t>(sizeof(T)));
    amx::load<5>(b, panel_bytes);
    amx::multiply_add<0, 4, 5>();
    if constexpr (N > 1) amx::load<6>(b + unit_columns, panel_bytes), amx::multiply_add<1, 4, 6>();
    if constexpr (N > 2) {
      amx::load<5>(b + next, panel_bytes), amx::multiply_add<2, 4, 5>();
      amx::load<6>(b + next + unit_columns, panel_bytes), amx::multiply_add<3, 4, 6>();
    }
  }
  static void end(float* sums, idx_t row_sums) {
    const idx_t row_bytes = row_sums * static_cast<idx_t>(sizeof(float));
    amx::store<0>(sums, row_bytes);
    if constexpr (N > 1) amx::store<1>(sums + unit_columns, row_bytes);
    if constexpr (N > 2) {
      amx::store<2>(sums + 2 * unit_columns, row_bytes);
      amx::store<3>(sums + 3 * unit_columns, row_bytes);
    }
  }
  /// All steps at once, for the first `depth` pairs, a multiple of unit_pairs.
  void run(idx_t depth, float* sums, idx_t row_sums) const {
    begin();
    for (idx_t k = 0; k < depth; k += unit_pairs) step(k);
    end(sums, row_sums);
  }
};
#endif

}}}  // namespace attn::ATTN_ISA::detail
