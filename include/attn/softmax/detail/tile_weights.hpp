// attn: step 3 of blockwise attention (blockwise.hpp): the scores of a row of a tile become weights.
#pragma once

#include <attn/softmax/detail/online_softmax.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Step 3, first half, for one row: raises `maximum` to that of its new scores, those of `row` times `factor`. Returns
/// the power of two that rescales the sums so far to the new `reference`; `largest` becomes that of the largest weight.
template <class T>
ATTN_INLINE T row_maximum(const T* row, idx_t count, T factor, T& maximum, T& reference, T& largest) {
  constexpr T minus_infinity = -std::numeric_limits<T>::infinity();
  packet<T> highest = broadcast<T>(minus_infinity);
  idx_t n = 0;
  for (; n + panel_width<T> <= count; n += panel_width<T>)
    highest = (max)(highest, (max)(load<T>(row + n), load<T>(row + n + width<T>)));
  if (n < count) highest = (max)(highest, load<T>(row + n));
  const T old = maximum, own = factor * max_lanes(highest);
  maximum = (std::max)(old, own);
  reference = maximum == minus_infinity ? T(0) : maximum;  // a row that has seen no key: 2^(-infinity - 0) = 0
  largest = own - reference;
  return old - reference;
}

/// Step 3, second half, for one row: scores times `factor` become weights, stored in `pairs` if given; those of slots
/// beyond the last become 0. Returns their sums, lane by lane.
template <class T>
ATTN_INLINE packet<T> row_weights(T* row, idx_t count, T factor, T reference, T* = nullptr) {
  packet<T> sum = zero<T>();
  for (idx_t n = 0; n < count; n += width<T>) {
    const packet<T> weight = exp2_weight<T>(fma(load<T>(row + n), broadcast<T>(factor), broadcast<T>(-reference)));
    store<T>(row + n, weight);
    sum = add(sum, weight);
  }
  return sum;
}
ATTN_INLINE packet<float> row_weights(float* row, idx_t count, float factor, float reference, bf16_pair* pairs) {
  packet<float> sum = zero<float>();
  for (idx_t n = 0; n < count; n += width<float>) {
    const packet<float> weight =
        exp2_rounded(fma(load<float>(row + n), broadcast<float>(factor), broadcast<float>(-reference)));
    const half_lanes rounded = to_bf16(weight);
    std::memcpy(reinterpret_cast<std::uint16_t*>(pairs) + n, &rounded, sizeof rounded);
    sum = add(sum, weight);
  }
  return sum;
}

#if ATTN_HAS_AMX
ATTN_INLINE packet<float> row_weights(float* row, idx_t count, float factor, float reference, split_pair* parts) {
  const packet<float> total = row_weights(row, count, factor, reference);
  split_lanes(row, count, parts);
  return total;
}
#endif

/// Weights as operands of the product with the values.
template <class T>
void to_operands(const T*, idx_t, T*) {}
inline void to_operands(const float* row, idx_t count, bf16_pair* pairs) { lanes_to_pairs(row, count, pairs); }
#if ATTN_HAS_AMX
inline void to_operands(const float* row, idx_t count, split_pair* parts) { split_lanes(row, count, parts); }
#endif

}}}  // namespace attn::ATTN_ISA::detail
