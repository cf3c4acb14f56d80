// attn: heads in memory, of any element type, and how a chunk of their rows is read, packed and written, as columns (a
// token is a lane) or as rows.
//
// Kernel attention is compiled once for each compute type T: only these functions, called once per chunk, depend on the
// element type S.
#pragma once

#include <attn/core/detail/any_rows.hpp>
#include <attn/core/detail/tile_product.hpp>

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
      : count(rows), lanes((std::max)(round_up(rows, width<T>), fill)), col_stride(stride) {}
};

template <class T>
struct stored_matrix;

/// Properties and functions of an element type, beside those of number_access.
template <class T>
struct element_access : number_access<T> {
  bool computes;  // the element type is T
  bool paired;    // products of such elements are of pairs (bf16_pair.hpp)
  void (*pack_columns)(const token_rows<T>&, idx_t cols, T* columns);
  bool (*pack_panels)(const stored_matrix<T>&, idx_t begin, idx_t count, T* panels);
  void (*pack_rows)(const stored_matrix<T>&, idx_t begin, idx_t count, T factor, T* packed);
  void (*pack_row_pairs)(const stored_matrix<T>&, idx_t begin, idx_t count, bf16_pair* packed);  // if `paired`
  void (*store_columns)(const T* columns, const stored_matrix<T>& to, idx_t begin, idx_t first, idx_t count, bool add);
};

/// One head.
template <class T>
struct stored_matrix {
  std::byte* data = nullptr;
  idx_t rows = 0, cols = 0;
  idx_t row_stride = 0, col_stride = 1;  // in bytes; in elements
  const element_access<T>* access = nullptr;

  std::byte* row(idx_t i) const { return data + i * row_stride; }
  /// A function of t that gives the address of row begin + t.
  template <class S>
  auto rows_from(idx_t begin) const {
    return [x = *this, begin](idx_t t) { return reinterpret_cast<const S*>(x.row(begin + t)); };
  }
  void read_row(idx_t i, T* to) const { access->load(row(i), col_stride, cols, to); }
  void write_row(const T* from, idx_t i, bool add = false) const {
    access->store(from, cols, row(i), col_stride, add);
  }
  /// Columns [col, col + count) of it.
  void write_part(const T* from, idx_t i, idx_t col, idx_t count) const {
    access->store(from, count, row(i) + col * col_stride * access->size, col_stride, false);
  }
  /// Rows [begin, begin + count), for as many lanes as whole vectors take, or `fill`. Rows before `first` are not read:
  /// row `first` is repeated for them.
  token_rows<T> block(idx_t begin, idx_t count, idx_t first = 0, idx_t fill = 1) const {
    token_rows<T> rows_of(count, col_stride, fill);
    for (idx_t t = 0; t < count; ++t) rows_of.at[t] = row(begin + (std::max)(t, first));
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
      packet<T> square[array_size<w>];
      load_across(square, from, c, cols, x.col_stride);
      T* const to = columns + c * kernel_chunk + t;
      if (c + w <= cols)
        unroll<w>([&](auto j) { store<T>(to + j * kernel_chunk, map(square[j])); });
      else
        for (int j = 0; j < cols - c; ++j) store<T>(to + j * kernel_chunk, map(square[j]));
    }
  }
}

template <class T, class S>
matrix_view<S> matrix_of(const stored_matrix<T>& x) {
  return {reinterpret_cast<S*>(x.data), x.rows, x.cols, x.row_stride / static_cast<idx_t>(sizeof(S)), x.col_stride};
}

/// Rows [first, count) of the `count` from `begin` on; at(c * kernel_chunk + t) gives elements c of tokens from t on.
template <class T, class S, class At>
void store_columns(At&& at, const matrix_view<S>& to, idx_t begin, idx_t first, idx_t count, bool accumulate) {
  constexpr int w = width<T>;
  for (idx_t t = first / w * w; t < count; t += w)
    for (idx_t c = 0; c < to.cols; c += w) {
      packet<T> square[array_size<w>];
      const idx_t cols = std::min<idx_t>(w, to.cols - c), last = cols - 1;
      for (int j = 0; j < w; ++j) square[j] = at((c + std::min<idx_t>(j, last)) * kernel_chunk + t);
      transpose<T>(square);
      for (idx_t n = (std::max)(first - t, idx_t(0)); n < std::min<idx_t>(w, count - t); ++n) {
        S* const row = to.row(begin + t + n) + c * to.col_stride;
        if constexpr (std::same_as<S, T>) {
          if (to.col_stride == 1 && cols == w) {
            store<T>(row, accumulate ? add(load<T>(row), square[n]) : square[n]);
            continue;
          }
        }
        alignas(64) T sums[array_size<w>];
        store<T>(sums, square[n]);
        for (idx_t d = 0; d < cols; ++d) store_gradient(row[d * to.col_stride], sums[d], accumulate);
      }
    }
}

template <class S, class T>
inline constexpr element_access<T> access_to = {
    number_access_of<T, S>,
    std::same_as<S, T>,
    (numbers_of<product_type<S>> > 1),
    [](const token_rows<T>& x, idx_t cols, T* columns) {
      pack_columns<S>(x, cols, columns, [](const packet<T>& p) { return p; });
    },
    [](const stored_matrix<T>& x, idx_t begin, idx_t count, T* panels) {
      return pack_panels<T>(x.template rows_from<S>(begin), 0, count, x.cols, x.col_stride, panels, kernel_chunk);
    },
    [](const stored_matrix<T>& x, idx_t begin, idx_t count, T factor, T* packed) {
      pack_rows<T>(x.template rows_from<S>(begin), count, x.cols, x.col_stride, factor, packed);
    },
    [](const stored_matrix<T>& x, idx_t begin, idx_t count, bf16_pair* packed) {
      if constexpr (numbers_of<product_type<S>> > 1)
        pack_rows<bf16_pair>(x.template rows_from<S>(begin), count, x.cols, x.col_stride, 1, packed);
    },
    [](const T* columns, const stored_matrix<T>& to, idx_t begin, idx_t first, idx_t count, bool add) {
      store_columns<T>([=](idx_t n) { return load<T>(columns + n); }, matrix_of<T, S>(to), begin, first, count, add);
    }};

/// A tensor [batch, head, length, dim].
template <class T>
struct stored_tensor {
  std::byte* data = nullptr;
  /// Strides in bytes; of a null view 0, so that no address is formed from it. They may wrap before the call is checked.
  idx_t extents[4] = {}, strides[4] = {};
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
      if (data) strides[axis] = static_cast<idx_t>(static_cast<std::size_t>(x.stride(axis)) * sizeof(S));
    }
  }
  stored_matrix<T> head(idx_t b, idx_t h) const {
    return {data + b * strides[0] + h * strides[1], extents[2], extents[3], strides[2], col_stride, access};
  }
};

/// One head of a gradient, or none.
template <class T>
struct stored_gradient_head : stored_matrix<T> {
  bool accumulate = false;

  explicit operator bool() const { return this->access != nullptr; }
  /// Rows [first, count) of the `count` from `begin` on, from columns [dim][kernel_chunk].
  void store_columns(const T* columns, idx_t begin, idx_t first, idx_t count) const {
    this->access->store_columns(columns, *this, begin, first, count, accumulate);
  }
  /// Rows [begin, begin + count), from rows `stride` apart.
  void store_rows(const T* from, idx_t stride, idx_t begin, idx_t count) const {
    for (idx_t i = 0; i < count; ++i) this->write_row(from + i * stride, begin + i, accumulate);
  }
  /// Whether whole panels of sums may be stored in the memory of the gradient.
  bool takes_panels() const {
    return this->access->computes && !accumulate && this->col_stride == 1 && this->cols % panel_width<T> == 0;
  }
  /// Zeros for padding, and for rows without a sum.
  void clear_rows(idx_t begin, idx_t end) const {
    if (!accumulate) stored_matrix<T>::clear_rows(begin, end);
  }
};

/// A gradient [batch, head, length, dim], or none.
template <class T>
struct stored_gradient : stored_tensor<T> {
  bool accumulate = false;

  stored_gradient() = default;
  template <class S>
  stored_gradient(const tensor_view<S>& view, bool add) : stored_tensor<T>(view), accumulate(add) {
    if (!view) this->access = nullptr;
  }

  explicit operator bool() const { return this->access != nullptr; }
  stored_gradient_head<T> head(idx_t b, idx_t h) const {
    if (!*this) return {};
    return {stored_tensor<T>::head(b, h), accumulate};
  }
};

/// Rows of scratch memory as a gradient that is written over, or added to.
template <class T>
stored_gradient_head<T> scratch_gradient(T* rows, idx_t count, idx_t cols, bool accumulate) {
  return {{reinterpret_cast<std::byte*>(rows), count, cols, cols * static_cast<idx_t>(sizeof(T)), 1, &access_to<T, T>},
          accumulate};
}

}}}  // namespace attn::ATTN_ISA::detail
