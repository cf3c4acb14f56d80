// attn: rows in memory, of any element type, and how they are read, packed and written.
//
// Kernel attention is compiled once for each compute type T: only these functions, called once per chunk, depend on the
// element type S.
#pragma once

#include <attn/core/detail/check.hpp>
#include <attn/core/detail/tile_product.hpp>
#include <attn/core/tensor_view.hpp>

#include <cstring>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Tokens of a chunk: enough to make good use of the sums once they are loaded, few enough that the triangle stays
/// small.
inline constexpr int kernel_chunk = 64;

/// The addresses of up to a chunk of rows. Each becomes a lane; lanes [count, lanes) repeat the last row, those beyond
/// are not filled in.
template <class T>
struct token_rows {
  const void* at[kernel_chunk];
  idx_t count = 0, lanes = 0, col_stride = 1;

  token_rows(idx_t rows, idx_t stride, idx_t fill = 1)
      : count(rows), lanes(std::max(round_up(rows, width<T>), fill)), col_stride(stride) {}
};

template <class T>
struct stored_matrix;

/// Properties and functions of an element type.
template <class T>
struct element_access {
  idx_t size;     // in bytes
  bool computes;  // the element type is T
  bool paired;    // products of such elements are of pairs (bf16_pair.hpp)
  void (*pack_columns)(const token_rows<T>&, idx_t cols, T* columns);
  bool (*pack_panels)(const stored_matrix<T>&, idx_t begin, idx_t count, T* panels);
  void (*pack_rows)(const stored_matrix<T>&, idx_t begin, idx_t count, T factor, T* packed);
  void (*pack_row_pairs)(const stored_matrix<T>&, idx_t begin, idx_t count, bf16_pair* packed);  // if `paired`
  void (*read)(const void* row, idx_t cols, idx_t stride, T* to);
  void (*write)(const T* from, void* row, idx_t cols, idx_t stride);
};

/// One head.
template <class T>
struct stored_matrix {
  std::byte* data = nullptr;
  idx_t rows = 0, cols = 0;
  idx_t row_stride = 0, col_stride = 1;  // in bytes; in elements
  const element_access<T>* access = nullptr;

  std::byte* row(idx_t i) const { return data + i * row_stride; }
  void read_row(idx_t i, T* to) const { access->read(row(i), cols, col_stride, to); }
  void write_row(const T* from, idx_t i) const { access->write(from, row(i), cols, col_stride); }
  /// Columns [col, col + count) of it.
  void write_part(const T* from, idx_t i, idx_t col, idx_t count) const {
    access->write(from, row(i) + col * col_stride * access->size, count, col_stride);
  }
  /// Rows [begin, begin + count), for as many lanes as whole vectors take, or `fill`. Rows before `first` are not read:
  /// row `first` is repeated for them.
  token_rows<T> block(idx_t begin, idx_t count, idx_t first = 0, idx_t fill = 1) const {
    token_rows<T> rows_of(count, col_stride, fill);
    for (idx_t t = 0; t < count; ++t) rows_of.at[t] = row(begin + std::max(t, first));
    return rows_of;
  }
  /// Zeros: padding.
  [[gnu::noinline]] void clear_rows(idx_t begin, idx_t end) const {
    for (idx_t i = begin; i < end; ++i)
      if (col_stride == 1)
        std::memset(row(i), 0, static_cast<std::size_t>(cols * access->size));
      else
        for (idx_t d = 0; d < cols; ++d)
          std::memset(row(i) + d * col_stride * access->size, 0, static_cast<std::size_t>(access->size));
  }
};

/// columns[c * kernel_chunk + t] = map(element c of row t), map taking packets.
template <class S, class T, class Map>
void pack_columns(const token_rows<T>& x, idx_t cols, T* columns, Map&& map) {
  constexpr int w = width<T>;
  const auto row = [&](idx_t t) { return static_cast<const S*>(x.at[t]); };
  for (idx_t t = 0; t < x.lanes; t += w) {
    if (t >= x.count) {  // lanes that are not used, but must not be NaN
      for (idx_t c = 0; c < cols; ++c) store<T>(columns + c * kernel_chunk + t, load<T>(columns + c * kernel_chunk));
      continue;
    }
    const row_pointers<T, S> from(row, t, x.count);
    for (idx_t c = 0; c < cols; c += w) {
      packet<T> square[w];
      load_across(square, from, c, cols, x.col_stride);
      T* const to = columns + c * kernel_chunk + t;
      if (c + w <= cols)
        unroll<w>([&](auto j) { store<T>(to + j * kernel_chunk, map(square[j])); });
      else
        for (int j = 0; j < cols - c; ++j) store<T>(to + j * kernel_chunk, map(square[j]));
    }
  }
}

template <class S, class T>
inline constexpr element_access<T> access_to = {
    .size = sizeof(S),
    .computes = std::same_as<S, T>,
    .paired = numbers_of<product_type<S>> > 1,
    .pack_columns = [](const token_rows<T>& x, idx_t cols,
                       T* columns) { pack_columns<S>(x, cols, columns, [](const packet<T>& p) { return p; }); },
    .pack_panels =
        [](const stored_matrix<T>& x, idx_t begin, idx_t count, T* panels) {
          const auto row = [&](idx_t t) { return reinterpret_cast<const S*>(x.row(begin + t)); };
          return detail::pack_panels<T>(row, 0, count, x.cols, x.col_stride, panels, kernel_chunk);
        },
    .pack_rows =
        [](const stored_matrix<T>& x, idx_t begin, idx_t count, T factor, T* packed) {
          const auto row = [&](idx_t i) { return reinterpret_cast<const S*>(x.row(begin + i)); };
          detail::pack_rows<T>(row, count, x.cols, x.col_stride, factor, packed);
        },
    .pack_row_pairs =
        [](const stored_matrix<T>& x, idx_t begin, idx_t count, bf16_pair* packed) {
          if constexpr (numbers_of<product_type<S>> > 1) {
            const auto row = [&](idx_t i) { return reinterpret_cast<const S*>(x.row(begin + i)); };
            detail::pack_rows<bf16_pair>(row, count, x.cols, x.col_stride, 1, packed);
          }
        },
    .read =
        [](const void* row, idx_t cols, idx_t stride, T* to) {
          const S* const from = static_cast<const S*>(row);
          for (idx_t d = 0; d < cols; ++d) to[d] = static_cast<T>(from[d * stride]);
        },
    .write =
        [](const T* from, void* row, idx_t cols, idx_t stride) {
          const matrix_view<S> to{static_cast<S*>(row), 1, cols, 0, stride};
          detail::write_row(from, to, 0);
        }};

/// A tensor [batch, head, length, dim].
template <class T>
struct stored_tensor {
  std::byte* data = nullptr;
  idx_t extents[4] = {}, strides[4] = {};  // strides in bytes; of a null view 0, so that no address is formed from it
  idx_t col_stride = 1;
  const element_access<T>* access = nullptr;

  stored_tensor() = default;
  template <class S>
  stored_tensor(const tensor_view<S>& x)
      : data(reinterpret_cast<std::byte*>(const_cast<std::remove_const_t<S>*>(x.data()))),
        col_stride(x.stride(3)),
        access(&access_to<std::remove_const_t<S>, T>) {
    for (int axis = 0; axis < 4; ++axis) {
      extents[axis] = x.extent(axis);
      strides[axis] = data ? x.stride(axis) * static_cast<idx_t>(sizeof(S)) : 0;
    }
  }
  stored_matrix<T> head(idx_t b, idx_t h) const {
    return {data + b * strides[0] + h * strides[1], extents[2], extents[3], strides[2], col_stride, access};
  }
};

}}}  // namespace attn::ATTN_ISA::detail
