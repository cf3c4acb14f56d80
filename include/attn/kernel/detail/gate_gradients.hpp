// attn: the gradients of the gates of one chunk: d g_t = <dL/dS_t, S_(t-1)>, never divided by a gate, which may be 0.
//
// With S, R the sums before and after the chunk, W_ji the gradient of the weight of a key and a query times that
// weight, both without gates, and g(j, i) = g_j ... g_i (1 where j > i):
//
//   d g_t = g(0, t-1) g(t+1, end) <S, R>  +  g(0, t-1) Y_t  +  g(t+1, end) Z_t  +  sum_{j < t} c_j g(j+1, t-1) X_tj
//   Y_t = sum_{i >= t} g(t+1, i) <S, query i>         Z_t = sum_{j < t} c_j g(j+1, t-1) <key j, R>
//   X_tj = sum_{i >= t} g(t+1, i) W_ji                c_j = 1, or 1 - g_j: then less  g(t+1, end) <key t, R> + X_tt
#pragma once

#include <attn/kernel/detail/kernel_sums.hpp>
#include <attn/kernel/detail/stored_rows.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// <a, b>, z included.
template <class T>
T dot_sums(const kernel_sums<T>& a, const kernel_sums<T>& b) {
  constexpr idx_t wide = panel_width<T>, w = width<T>;
  T total = T(0);
  for (idx_t col = 0; col < a.dim_v; col += w) {  // vectors beyond the last column were never written
    const T *x = a.panel(col / wide * wide) + col % wide, *y = b.panel(col / wide * wide) + col % wide;
    packet<T> even = zero<T>(), odd = zero<T>();
    for (idx_t r = 0; r < a.features; r += 2) {
      even = fma(load<T>(x + r * wide), load<T>(y + r * wide), even);
      if (r + 1 < a.features) odd = fma(load<T>(x + (r + 1) * wide), load<T>(y + (r + 1) * wide), odd);
    }
    total += sum_lanes(add(even, odd));
  }
  for (idx_t r = 0; r < a.features; ++r) total = std::fma(a.weights[r], b.weights[r], total);
  return total;
}

/// The gates and products of a chunk.
template <class T>
struct gate_chunk {
  idx_t count;
  bool complement;
  const T *gates, *decay, *score_factor;  // [query][key], c_j included
  T* products;                           // W [query][key] for keys up to the query; becomes X
  const T *queries, *keys;               // <S, query i>, <key j, R>
  T of_sums;                             // <S, R>

  void add_to(T* gradient) const {
    for (idx_t t = count - 2; t >= 0; --t)
      for (idx_t j = 0; j <= t; j += width<T>) {
        T* const row = products + t * kernel_chunk + j;
        store<T>(row, fma(broadcast<T>(gates[t + 1]), load<T>(row + kernel_chunk), load<T>(row)));
      }
    T y[kernel_chunk], later[kernel_chunk];
    for (idx_t t = count - 1; t >= 0; --t) {
      y[t] = queries[t] + (t + 1 < count ? gates[t + 1] * y[t + 1] : T(0));
      later[t] = t + 1 < count ? gates[t + 1] * later[t + 1] : T(1);
    }
    T z = T(0);
    for (idx_t t = 0; t < count; ++t) {
      const T* const x = products + t * kernel_chunk;
      if (t > 0) z = (complement ? T(1) - gates[t - 1] : T(1)) * keys[t - 1] + gates[t - 1] * z;
      const T before = t > 0 ? decay[t - 1] : T(1);
      T sum = before * later[t] * of_sums + before * y[t] + later[t] * z;
      if (t > 0) sum += dot_rows(score_factor + (t - 1) * kernel_chunk, x, t);
      if (complement) sum -= later[t] * keys[t] + x[t];
      gradient[t] += sum;
    }
  }
};

}}}  // namespace attn::ATTN_ISA::detail
