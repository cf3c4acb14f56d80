// attn: what the backward pass of every operator does with the gradients it is asked for: a gradient is of something
// given, has its shape, and is written over or added to, once.
#pragma once

#include <attn/core/detail/check.hpp>
#include <attn/core/detail/simd.hpp>

namespace attn::inline ATTN_ISA::detail {

/// A view of the shape of another.
[[gnu::noinline]] inline void check_same_shape(const validator& check, const char* what, const memory_layout& x,
                                               const char* other, const memory_layout& like) {
  for (int axis = 0; axis < x.rank; ++axis)
    if (x.extents[axis] != like.extents[axis])
      check.fail(text({what, " of the shape of ", other, " ", list_text(like.extents, like.rank)}),
                 list_text(x.extents, x.rank));
}

/// A gradient that is asked for is of something given, and of its shape; `of` is the name of what is differentiated.
[[gnu::noinline]] inline void check_gradient(const validator& check, const char* of, const memory_layout& gradient,
                                             const memory_layout& x) {
  if (!gradient.given()) return;
  if (!x.given()) check.fail(text({of, ", since its gradient is asked for"}), "none");
  check_same_shape(check, text({"the gradient of ", of}).c_str(), gradient, of, x);
}

/// A sum becomes an entry of a gradient, or is added to it.
template <class To, class T>
ATTN_INLINE void store_gradient(To& to, T sum, bool accumulate) {
  to = static_cast<To>(accumulate ? static_cast<T>(to) + sum : sum);
}

/// Rows [begin, end) of a gradient from rows of sums, times `factor`; those from `real` on are padding, whose gradient is
/// 0.
template <class T, class S>
void store_gradient_rows(const T* sums, index stride, T factor, const matrix_view<S>& to, index begin, index end,
                         index real, bool accumulate) {
  for (index i = begin; i < end; ++i) {
    S* const row = to.row(i);
    const T* const sum = sums + i * stride;
    if (i >= real)
      for (index d = 0; d < to.cols; ++d) store_gradient(row[d * to.col_stride], T(0), accumulate);
    else if (to.col_stride == 1)
      for (index d = 0; d < to.cols; ++d) store_gradient(row[d], sum[d] * factor, accumulate);
    else
      for (index d = 0; d < to.cols; ++d) store_gradient(row[d * to.col_stride], sum[d] * factor, accumulate);
  }
}

}  // namespace attn::inline ATTN_ISA::detail
