// attn: landmarks, the means of balanced segments of a sequence.
#pragma once

#include <attn/core/attention_shape.hpp>
#include <attn/core/tile_product.hpp>

namespace attn::detail {

inline constexpr index landmark_step = 16;  // that one task takes

/// Segment a of `length` tokens in `count` segments begins at token floor(a length / count).
inline index segment_begin(index a, index length, index count) {
  const index whole = length / count, rest = length % count;
  return a * whole + a * rest / count;  // a * length might overflow
}

/// Row a of `means`, a from `first` to `last`, becomes the mean of segment a of x.
template <class T, class S>
void segment_means(const matrix_view<const S>& x, index length, index count, index first, index last, T* means) {
  for (index a = first; a < last; ++a) {
    const index begin = segment_begin(a, length, count), end = segment_begin(a + 1, length, count);
    const packet<T> share = broadcast<T>(T(1) / static_cast<T>(end - begin));
    for (index d = 0; d < x.cols; d += width<T>) {
      packet<T> sum = zero<T>();
      for (index i = begin; i < end; ++i)
        sum = add(sum, load_part<T>(x.row(i) + d * x.col_stride, x.col_stride, x.cols - d));
      sum = mul(sum, share);
      T* const to = means + a * x.cols + d;
      if (d + width<T> <= x.cols) {
        store<T>(to, sum);
      } else {
        alignas(64) T lanes[width<T>];
        store<T>(lanes, sum);
        std::copy_n(lanes, x.cols - d, to);
      }
    }
  }
}

}  // namespace attn::detail
