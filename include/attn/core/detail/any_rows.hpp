// attn: rows of numbers in memory of any element type, read and written as numbers of the compute type T. What works on
// them is compiled once for T; these functions alone for each element type S.
#pragma once

#include <attn/core/detail/check.hpp>
#include <attn/core/detail/gradients.hpp>
#include <attn/core/detail/packing.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Functions for elements of one type, of `size` bytes; they are `stride` elements apart.
template <class T>
struct number_access {
  idx_t size;
  void (*load)(const void* from, idx_t stride, idx_t count, T* to);
  /// Written over, or added to.
  void (*store)(const T* from, idx_t count, void* to, idx_t stride, bool add);
  /// Zeros in rows [begin, end).
  void (*clear)(const matrix_view<void>& x, idx_t begin, idx_t end);
};

/// A matrix with its element type.
template <class S, class Void>
matrix_view<S> typed(const matrix_view<Void>& x) {
  return {static_cast<S*>(x.data), x.rows, x.cols, x.row_stride, x.col_stride};
}

template <class T, class S>
inline constexpr number_access<T> number_access_of = {
    .size = sizeof(S),
    .load =
        [](const void* first, idx_t stride, idx_t count, T* to) {
          const S* const from = static_cast<const S*>(first);
          idx_t n = 0;
          for (; n + width<T> <= count; n += width<T>)
            detail::store<T>(to + n, load_part<T>(from + n * stride, stride, width<T>));
          for (; n < count; ++n) to[n] = static_cast<T>(from[n * stride]);
        },
    .store =
        [](const T* from, idx_t count, void* first, idx_t stride, bool add) {
          S* const to = static_cast<S*>(first);
          const matrix_view<S> row{to, 1, count, 0, stride};
          if (add)
            store_gradient_row(from, T(1), row, 0, true);
          else
            write_row(from, row, 0);
        },
    .clear = [](const matrix_view<void>& x, idx_t begin, idx_t end) { clear_rows(typed<S>(x), begin, end); }};

/// Rows along the last axis of a view, counted over all other axes, of which there are up to two.
template <class T>
struct any_rows : memory_layout {
  const number_access<T>* access = nullptr;

  template <class S, int Rank>
  any_rows(const tensor_view<S, Rank>& x)
      : memory_layout(x), access(&number_access_of<T, std::remove_const_t<S>>) {
    static_assert(Rank <= 3);
  }

  /// Number `d` of row n.
  char* at(idx_t n, idx_t d = 0) const {
    if (!data) return nullptr;
    idx_t offset = d * strides[rank - 1];
    if (rank == 2) offset += n * strides[0];
    if (rank == 3) offset += n / extents[1] * strides[0] + n % extents[1] * strides[1];
    return const_cast<char*>(data) + offset * item;
  }
  /// Row n where it lies, if it has numbers of T one after another, else null.
  T* numbers(idx_t n) const {
    return item == idx_t(sizeof(T)) && strides[rank - 1] == 1 ? static_cast<T*>(static_cast<void*>(at(n))) : nullptr;
  }
  /// Numbers [begin, begin + count) of row n.
  void load(idx_t n, idx_t begin, idx_t count, T* to) const {
    access->load(at(n, begin), strides[rank - 1], count, to);
  }
  void store(idx_t n, idx_t begin, idx_t count, const T* from, bool add = false) const {
    access->store(from, count, at(n, begin), strides[rank - 1], add);
  }
  /// Of a list that may be left out; all are `otherwise` then.
  void load_or(T otherwise, idx_t begin, idx_t count, T* to) const {
    if (data)
      load(0, begin, count, to);
    else
      std::fill(to, to + count, otherwise);
  }
};

}}}  // namespace attn::ATTN_ISA::detail
