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
      check.fail({what, " of the shape of ", other, " ", list_text(like.extents, like.rank)},
                 list_text(x.extents, x.rank));
}

/// Checks that a gradient that is asked for belongs to an input that was given, and has its shape; `of` is the name of
/// that input.
[[gnu::noinline]] inline void check_gradient(const validator& check, const char* of, const memory_layout& gradient,
                                             const memory_layout& x) {
  if (!gradient.given()) return;
  if (!x.given()) check.fail({of, ", since its gradient is asked for"}, "none");
  if (!std::equal(x.extents, x.extents + x.rank, gradient.extents))  // no text, which allocates, unless it is needed
    check_same_shape(check, text({"the gradient of ", of}).c_str(), gradient, of, x);
}

/// The views of a backward call, gathered for validator::memory: what is written, which are the gradients, and what is
/// read.
class backward_views {
 public:
  void read(const char* name, const memory_layout& view) { read_[reads_++] = {name, view}; }
  /// A gradient by its full name, "the gradient of q", of x.
  void gradient(const char* name, const memory_layout& view, const char* of, const memory_layout& x) {
    gradients_[written_] = {of, x};
    written_views_[written_++] = {name, view};
    read(of, x);
  }
  /// Checks that nothing overlaps, and that every gradient belongs to an input that was given and has its shape.
  [[gnu::noinline]] void check(const validator& check) const {
    check.memory(std::span(written_views_, written_), std::span(read_, reads_));
    for (std::size_t n = 0; n < written_; ++n)
      check_gradient(check, gradients_[n].name, written_views_[n].view, gradients_[n].view);
  }

 private:
  static constexpr std::size_t most = 24;
  validator::named_view written_views_[most], gradients_[most], read_[2 * most];
  std::size_t written_ = 0, reads_ = 0;
};

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
    for (idx_t d = 0; d < to.cols && !accumulate; ++d) row[d * to.col_stride] = static_cast<S>(T(0));
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
  for (idx_t i = begin; i < end; ++i)
    store_gradient_row(i < real ? sums + i * stride : nullptr, factor, to, i, accumulate);
}

}  // namespace attn::inline ATTN_ISA::detail
