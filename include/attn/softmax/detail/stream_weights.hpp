// attn: weights of the streaming kernel (streaming.hpp).
#pragma once

#include <attn/softmax/detail/stream_rows.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// 2^x, as exact as the products it is used in.
template <class T, class C>
ATTN_INLINE packet<T> stream_weight(const packet<T>& x) {
  if constexpr (std::same_as<stream_operand<T, C>, T>)
    return exp2_weight<T>(x);
  else
    return exp2_rounded(x);
}

/// Turns scores of R rows, whole packets, into weights, whose sums are stored; the sums of earlier ones are to be
/// multiplied with 2^rescale. `zeros` is set where a weight may be 0; `largest` are those of the rows, for rows in
/// codes. The rows take turns: one alone waits for its own results.
template <int R, class C, class T, class Factors>
ATTN_INLINE void softmax_weights(T* scores, idx_t count, const Factors& of_values, T* maximum, bool& zeros, T* largest,
                                 T* sums, T* rescale) {
  constexpr T minus_infinity = -std::numeric_limits<T>::infinity();
  packet<T> highest[array_size<R>], sum[array_size<R>], most[array_size<R>], least = broadcast<T>(T(1));
  unroll<R>([&](auto r) { highest[r] = broadcast<T>(minus_infinity), sum[r] = most[r] = zero<T>(); });
  for (idx_t j = 0; j < count; j += width<T>)
    unroll<R>([&](auto r) { highest[r] = (max)(highest[r], load<T>(scores + r * stream_tile + j)); });
  T reference[R];
  unroll<R>([&](auto r) {
    const T before = maximum[r], raised = (std::max)(before, max_lanes(highest[r]));
    reference[r] = raised == minus_infinity ? T(0) : raised;
    rescale[r] = before - reference[r], maximum[r] = raised;
  });
  for (idx_t j = 0; j < count; j += width<T>)
    unroll<R>([&](auto r) {
      T* const s = scores + r * stream_tile + j;
      const packet<T> weight = stream_weight<T, C>(sub(load<T>(s), broadcast<T>(reference[r])));
      const packet<T> times = of_values.times(weight, j);
      store<T>(s, times);
      sum[r] = add(sum[r], weight);
      if constexpr (Factors::in_codes)
        most[r] = (max)(most[r], times);
      else
        least = (min)(least, weight);
    });
  unroll<R>([&](auto r) {
    sums[r] = sum_lanes(sum[r]);
    if constexpr (Factors::in_codes) largest[r] = max_lanes(most[r]);
  });
  if constexpr (!Factors::in_codes)
    zeros |= !(min_lanes(least) >= (std::numeric_limits<T>::min)());  // smaller ones become 0 as bf16
}

}}}  // namespace attn::ATTN_ISA::detail
