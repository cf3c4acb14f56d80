// attn: gradients in memory, of any element type, and how kernel attention writes them: a chunk of tokens at once, from
// columns (a token is a lane) or from rows.
#pragma once

#include <attn/core/detail/gradients.hpp>
#include <attn/kernel/detail/stored_rows.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Functions for the element type of a gradient.
template <class T>
struct gradient_access {
  /// Rows [first, count) of the `count` from `begin` on, from columns [dim][kernel_chunk].
  void (*store_columns)(const T* columns, const stored_matrix<T>& to, idx_t begin, idx_t first, idx_t count,
                        bool accumulate);
  /// Rows [begin, begin + count), from rows `stride` apart.
  void (*store_rows)(const T* rows, idx_t stride, const stored_matrix<T>& to, idx_t begin, idx_t count,
                     bool accumulate);
};

template <class T, class S>
matrix_view<S> matrix_of(const stored_matrix<T>& x) {
  return {reinterpret_cast<S*>(x.data), x.rows, x.cols, x.row_stride / static_cast<idx_t>(sizeof(S)), x.col_stride};
}

/// Rows [first, count) of the `count` from `begin` on; at(c * kernel_chunk + t) gives elements c of the tokens from t on.
template <class T, class S, class At>
void store_columns(At&& at, const matrix_view<S>& to, idx_t begin, idx_t first, idx_t count, bool accumulate) {
  constexpr int w = width<T>;
  for (idx_t t = first / w * w; t < count; t += w)
    for (idx_t c = 0; c < to.cols; c += w) {
      packet<T> square[w];
      const idx_t cols = std::min<idx_t>(w, to.cols - c), last = cols - 1;
      for (int j = 0; j < w; ++j) square[j] = at((c + std::min<idx_t>(j, last)) * kernel_chunk + t);
      transpose<T>(square);
      for (idx_t n = std::max(first - t, idx_t(0)); n < std::min<idx_t>(w, count - t); ++n) {
        S* const row = to.row(begin + t + n) + c * to.col_stride;
        if constexpr (std::same_as<S, T>) {
          if (to.col_stride == 1 && cols == w) {
            store<T>(row, accumulate ? add(load<T>(row), square[n]) : square[n]);
            continue;
          }
        }
        alignas(64) T sums[w];
        store<T>(sums, square[n]);
        for (idx_t d = 0; d < cols; ++d) store_gradient(row[d * to.col_stride], sums[d], accumulate);
      }
    }
}

template <class S, class T>
inline constexpr gradient_access<T> gradient_access_to = {
    .store_columns = [](const T* columns, const stored_matrix<T>& to, idx_t begin, idx_t first, idx_t count,
                        bool accumulate) {
      detail::store_columns<T>([=](idx_t n) { return load<T>(columns + n); }, matrix_of<T, S>(to), begin, first, count,
                               accumulate);
    },
    .store_rows =
        [](const T* rows, idx_t stride, const stored_matrix<T>& to, idx_t begin, idx_t count, bool accumulate) {
          for (idx_t i = 0; i < count; ++i)
            store_gradient_row(rows + i * stride, T(1), matrix_of<T, S>(to), begin + i, accumulate);
        }};

/// One head of a gradient, or none.
template <class T>
struct stored_gradient_head {
  stored_matrix<T> to;
  const gradient_access<T>* access = nullptr;
  bool accumulate = false;

  explicit operator bool() const { return access != nullptr; }
  void store_columns(const T* columns, idx_t begin, idx_t first, idx_t count) const {
    access->store_columns(columns, to, begin, first, count, accumulate);
  }
  void store_rows(const T* rows, idx_t stride, idx_t begin, idx_t count) const {
    access->store_rows(rows, stride, to, begin, count, accumulate);
  }
  /// Whether whole panels of sums may be stored in the memory of the gradient.
  bool takes_panels() const {
    return to.access->computes && !accumulate && to.col_stride == 1 && to.cols % panel_width<T> == 0;
  }
  /// Zeros for padding, and for rows without a sum.
  void clear_rows(idx_t begin, idx_t end) const {
    if (!accumulate) to.clear_rows(begin, end);
  }
};

/// A gradient [batch, head, length, dim], or none.
template <class T>
struct stored_gradient {
  stored_tensor<T> x;
  const gradient_access<T>* access = nullptr;
  bool accumulate = false;

  stored_gradient() = default;
  template <class S>
  stored_gradient(const tensor_view<S>& view, bool add)
      : x(view), access(view ? &gradient_access_to<S, T> : nullptr), accumulate(add) {}

  explicit operator bool() const { return access != nullptr; }
  stored_gradient_head<T> head(idx_t b, idx_t h) const {
    if (!access) return {};
    return {x.head(b, h), access, accumulate};
  }
};

/// Rows of scratch memory as a gradient that is written over, or added to.
template <class T>
stored_gradient_head<T> scratch_gradient(T* rows, idx_t count, idx_t cols, bool accumulate) {
  return {{reinterpret_cast<std::byte*>(rows), count, cols, cols * static_cast<idx_t>(sizeof(T)), 1, &access_to<T, T>},
          &gradient_access_to<T, T>,
          accumulate};
}

}}}  // namespace attn::ATTN_ISA::detail
