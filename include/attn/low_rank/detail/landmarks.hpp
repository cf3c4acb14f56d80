// attn: landmarks, the means of balanced segments of a sequence.
#pragma once

#include <attn/core/detail/attention_shape.hpp>
#include <attn/core/detail/tile_product.hpp>

namespace attn::inline ATTN_ISA::detail {

inline constexpr index landmark_step = 16;  // that one task takes

/// Segment a of `length` tokens in `count` segments begins at token floor(a length / count).
inline index segment_begin(index a, index length, index count) {
  const index whole = length / count, rest = length % count;
  return a * whole + a * rest / count;  // a * length might overflow
}

/// The mean of rows [begin, end) of x: several packets of columns at a time, so that rows are read from end to end.
template <class T, class S>
void mean_of_rows(const matrix_view<const S>& x, index begin, index end, T* mean) {
  constexpr int w = width<T>, together = 4;
  const packet<T> share = broadcast<T>(T(1) / static_cast<T>(end - begin));
  for (index d = 0; d < x.cols; d += together * w) {
    packet<T> sum[together];
    unroll<together>([&](auto n) { sum[n] = zero<T>(); });
    if (x.col_stride == 1 && d + together * w <= x.cols)
      for (index i = begin; i < end; ++i)
        unroll<together>([&](auto n) { sum[n] = add(sum[n], load_as<T>(x.row(i) + d + n * w)); });
    else
      for (index i = begin; i < end; ++i)
        for (int n = 0; n < together && d + n * w < x.cols; ++n)
          sum[n] = add(sum[n], load_part<T>(x.row(i) + (d + n * w) * x.col_stride, x.col_stride, x.cols - d - n * w));
    alignas(64) T lanes[together * w];
    unroll<together>([&](auto n) { store<T>(lanes + n * w, mul(sum[n], share)); });
    std::copy_n(lanes, std::min<index>(together * w, x.cols - d), mean + d);
  }
}

/// Row a of `means`, a from `first` to `last`, becomes the mean of segment a of x.
template <class T, class S>
void segment_means(const matrix_view<const S>& x, index length, index count, index first, index last, T* means) {
  for (index a = first; a < last; ++a)
    mean_of_rows(x, segment_begin(a, length, count), segment_begin(a + 1, length, count), means + a * x.cols);
}

}  // namespace attn::detail
