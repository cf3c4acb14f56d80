// attn: elements of caches, and how memory holds rows of numbers as such elements: row by row, or in blocks of codes.
#pragma once

#include <attn/core/detail/channel_codes.hpp>
#include <attn/core/detail/check.hpp>
#include <attn/core/detail/coded.hpp>
#include <attn/core/detail/quantised.hpp>

#include <limits>
#include <vector>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// How memory holds rows of numbers: `rows` of them together in as many elements. Of an item the last `tail` of these
/// are for rows that are not together yet. one_scale: whether a row has one scale for all its numbers.
template <class C>
struct row_format {
  static constexpr idx_t rows = 1, tail = 0;
  static constexpr bool one_scale = false;
  static constexpr bool finite = sizeof(C) == 1;  // whether numbers must be
  static constexpr float most = [] {              // the largest number
    if constexpr (eight_bit_float<C>)
      return C::largest;
    else
      return std::same_as<C, Eigen::half> ? 65504.f : 0x1.fep127f;
  }();
  static constexpr const char* numbers = sizeof(C) == 1 ? "eight-bit ones" : "16-bit ones";
  static idx_t elements(idx_t cols, bool) { return cols; }
  static idx_t cols(idx_t elements, bool) { return elements; }
  static idx_t ring(idx_t needed) { return needed; }
  static void validate(const validator&, const char*, idx_t) {}
  static void validate(const validator&, const char*, const tensor_view<C>&, bool) {}

  template <class S>
  static void put(const S* x, idx_t stride, bool, const matrix_view<C>& memory, idx_t row) {
    C* const to = memory.row(row);
    if constexpr (std::same_as<S, C>)
      if (stride == 1 && memory.col_stride == 1) return void(std::copy_n(x, memory.cols, to));
    for (idx_t c = 0; c < memory.cols; ++c) to[c * memory.col_stride] = static_cast<C>(x[c * stride]);
  }
  /// A row becomes what another one is, of memory in the same layout.
  static void move(const matrix_view<C>& from, idx_t from_row, bool, const matrix_view<C>& memory, idx_t row) {
    put(from.row(from_row), from.col_stride, false, memory, row);
  }
};
template <>
struct row_format<std::int8_t> {
  static constexpr idx_t rows = quantised_block, tail = 0, largest_code = 127;
  static constexpr bool finite = true, one_scale = true;
  static constexpr const char* numbers = "eight-bit ones";
  static constexpr float most = quantised_most;
  static std::int32_t code_most(idx_t dim) { return code_most_of(dim, largest_code); }
  static idx_t elements(idx_t cols, bool of_keys) { return quantised_layout{cols, of_keys}.bytes(); }
  static idx_t cols(idx_t elements, bool of_keys) { return quantised_layout::of_bytes(elements, of_keys).cols; }
  /// Number of rows a ring needs to hold so many: the block that is being overwritten holds none of them.
  static idx_t ring(idx_t needed) { return (needed + 2 * (quantised_block - 1)) / quantised_block * quantised_block; }

  static void validate(const validator& check, const char* what, idx_t cols) {
    if (cols % 2 != 0) check.fail({"an even ", what, " for eight-bit elements"}, cols);
    check.fits(what, {cols, 2 * quantised_block});  // more than the bytes of a block
  }
  /// The caller's memory.
  static void validate(const validator& check, const char* what, const tensor_view<std::int8_t>& x, bool of_keys) {
    const quantised_layout layout = quantised_layout::of_bytes(x.extent(3), of_keys);
    if (layout.cols < 0 || x.extent(3) != layout.bytes())
      check.fail({what, " in blocks of 64 + ", of_keys ? 18 : 16, " dim bytes"}, x.extent(3));
    if (x.empty()) return;
    row_format::validate(check, "dim", layout.cols);
    bool even = reinterpret_cast<std::uintptr_t>(x.data()) % 2 == 0 && x.stride(3) == 1;
    for (int axis = 0; axis < 3; ++axis) even &= x.stride(axis) % 2 == 0 || x.extent(axis) == 1;
    if (!even) check.fail({what, " in contiguous blocks at even addresses"}, "others");
  }

  template <class S>
  static void put(const S* x, idx_t stride, bool of_keys, const matrix_view<std::int8_t>& memory, idx_t row) {
    quantise_row(x, stride, quantised_layout::of_bytes(memory.cols, of_keys), memory.row(row / rows), row % rows);
  }
  static void move(const matrix_view<std::int8_t>& from, idx_t from_row, bool of_keys,
                   const matrix_view<std::int8_t>& memory, idx_t row) {
    move_quantised_row(quantised_layout::of_bytes(memory.cols, of_keys), from.row(from_row / rows), from_row % rows,
                       memory.row(row / rows), row % rows);
  }
};

template <channel_coded C>
struct row_format<C> {
  using layout = channel_layout<C>;
  static constexpr idx_t rows = channel_block, tail = layout::tail, largest_code = layout::most;
  static constexpr bool finite = true, one_scale = false;
  static constexpr const char* numbers = layout::bits == 4 ? "four-bit ones" : "eight-bit ones";
  static constexpr float most = quantised_most;
  static std::int32_t code_most(idx_t dim) { return code_most_of(dim, largest_code); }
  static idx_t elements(idx_t cols, bool of_keys) { return layout{cols, of_keys}.bytes(); }
  static idx_t cols(idx_t elements, bool of_keys) { return layout::of_bytes(elements, of_keys).cols; }

  static void validate(const validator& check, const char* what, idx_t cols) {
    check.fits(what, {cols, 2 * channel_block});  // more than the bytes of a block
  }
  /// The caller's memory.
  static void validate(const validator& check, const char* what, const tensor_view<C>& x, bool of_keys) {
    const layout l = layout::of_bytes(x.extent(3), of_keys);
    if (x.extent(3) != l.bytes())
      check.fail({what, " in blocks of ", l.bytes(), " bytes for a dim of ", l.cols}, x.extent(3));
    if (x.empty()) return;
    bool even = reinterpret_cast<std::uintptr_t>(x.data()) % 2 == 0 && x.stride(3) == 1;
    for (int axis = 0; axis < 3; ++axis) even &= x.stride(axis) % 2 == 0 || x.extent(axis) == 1;
    if (!even) check.fail({what, " in contiguous blocks at even addresses"}, "others");
  }

  template <class S>
  static void put(const S* x, idx_t stride, bool of_keys, const matrix_view<C>& memory, idx_t row) {
    channel_code_writer<C>{memory, layout::of_bytes(memory.cols, of_keys)}.put(x, stride, row);
  }
};

/// Rows that are moved one by one where blocks have a tail: a row of the last block of an item, or one that its block
/// has lost already, is read from where the tail was kept.
template <class C>
struct moved_rows {
  static constexpr std::size_t bytes() { return 0; }
};
template <channel_coded C>
struct moved_rows<C> {
  idx_t item = 0, first = 0, count = 0, stride = 0;
  std::vector<float> rows, row;  // those of the last block by head, of keys, then of values

  std::size_t bytes() const { return (rows.capacity() + row.capacity()) * sizeof(float); }
  void begin(idx_t of, idx_t of_rows, idx_t widest) {
    item = of, count = of_rows % channel_block, first = of_rows - count, stride = widest;
    rows.clear(), row.resize(static_cast<std::size_t>(widest));
  }
  void keep(const matrix_view<C>& x, bool of_keys) {
    const std::size_t begin = rows.size();
    rows.resize(begin + static_cast<std::size_t>(count * stride));
    rows_of(x, of_keys).expand(first, first + count, rows.data() + begin, stride);
  }
  void move(const matrix_view<C>& from, idx_t from_item, idx_t from_row, idx_t of, bool of_keys,
            const matrix_view<C>& memory, idx_t to_row, bool same) {
    const channel_rows<C> source = rows_of(from, of_keys);
    if (same && from_row == to_row && !source.in_tail(to_row)) return;
    const bool kept = from_item == item && from_row >= first && from_row < first + count;
    const float* numbers = row.data();
    if (kept)
      numbers = rows.data() + (of * count + from_row - first) * stride;
    else
      source.decode(from_row, row.data());
    row_format<C>::put(numbers, 1, of_keys, memory, to_row);
  }

 private:
  static channel_rows<C> rows_of(const matrix_view<C>& x, bool of_keys) {
    const auto layout = channel_layout<C>::of_bytes(x.cols, of_keys);
    return {{x.data, x.rows, x.cols, x.row_stride, 1}, layout, layout.cols};
  }
};

}}}  // namespace attn::ATTN_ISA::detail
