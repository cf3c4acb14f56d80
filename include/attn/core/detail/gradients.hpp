// attn: how every backward pass stores the gradients it is asked for: written over or added to, once.
#pragma once

#include <attn/core/detail/simd.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Writes a sum to an entry of a gradient, or adds it.
template <class To, class T>
ATTN_INLINE void store_gradient(To& to, T sum, bool accumulate) {
  to = static_cast<To>(accumulate ? static_cast<T>(to) + sum : sum);
}

template <class T>
void clear_gradient(const tensor_view<T>& x) {
  for (idx_t b = 0; b < x.extent(0); ++b)
    for (idx_t h = 0; h < x.extent(1); ++h) clear_rows(head_of(x, b, h), 0, x.extent(2));
}

/// Row i of a gradient from a row of sums, times `factor`; zeros where `sums` is null.
template <class T, class S>
void store_gradient_row(const T* sums, T factor, const matrix_view<S>& to, idx_t i, bool accumulate) {
  S* const row = to.row(i);
  if (!sums) {
    if (!accumulate) clear_rows(to, i, i + 1);
  } else if (to.col_stride == 1) {
    for (idx_t d = 0; d < to.cols; ++d) store_gradient(row[d], sums[d] * factor, accumulate);
  } else {
    for (idx_t d = 0; d < to.cols; ++d) store_gradient(row[d * to.col_stride], sums[d] * factor, accumulate);
  }
}

/// Rows [begin, end) of a gradient from rows of sums; those from `real` on are padding, whose gradient is 0.
template <class T, class S>
void store_gradient_rows(const T* sums, idx_t stride, T factor, const matrix_view<S>& to, idx_t begin, idx_t end,
                         idx_t real, bool accumulate) {
  for (idx_t i = begin; i < (std::min)(real, end); ++i)
    store_gradient_row(sums + i * stride, factor, to, i, accumulate);
  if (!accumulate) clear_rows(to, (std::max)(begin, real), end);
}

}}}  // namespace attn::ATTN_ISA::detail
