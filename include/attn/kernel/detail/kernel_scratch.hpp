// attn: what a worker of kernel attention keeps for a chunk, and how gates mix its tokens.
#pragma once

#include <attn/kernel/detail/chunk.hpp>

namespace attn::inline ATTN_ISA::detail {

/// What one worker needs.
template <class T>
struct kernel_scratch {
  T *k_phi, *k_own, *q_phi, *q_own, *values, *mix, *weights, *out, *keep, *factors, *work;
  T *k_shift, *k_top, *peak, *gates, *decay, *q_shift, *q_top, *own_top, *den, *state_factor, *own_factor, *eps;
  index stride;

  static kernel_scratch layout(arena& memory, index features, index dim_v, index work, bool leveled) {
    kernel_scratch s;
    const index phi = (features + tile_rows) * kernel_chunk, lanes = kernel_sums<T>::lanes(features);
    s.stride = round_up(dim_v, panel_width<T>);
    s.k_phi = memory.allocate<T>(phi);
    s.q_phi = memory.allocate<T>(phi);
    s.k_own = leveled ? memory.allocate<T>(phi) : s.k_phi;
    s.q_own = leveled ? memory.allocate<T>(phi) : s.q_phi;
    s.values = memory.allocate<T>(kernel_chunk * s.stride);
    s.mix = memory.allocate<T>(kernel_chunk * kernel_chunk);
    s.weights = memory.allocate<T>(tile_rows * kernel_chunk);
    s.out = memory.allocate<T>(tile_rows * s.stride);
    s.keep = memory.allocate<T>(lanes);
    s.factors = memory.allocate<T>(2 * lanes);
    s.work = memory.allocate<T>(work);
    for (T** each : {&s.k_shift, &s.k_top, &s.peak, &s.gates, &s.decay, &s.q_shift, &s.q_top, &s.own_top, &s.den,
                     &s.state_factor, &s.own_factor, &s.eps})
      *each = memory.allocate<T>(kernel_chunk);
    return s;
  }
};

/// Mixes of a chunk with gates: mix_ij = own_j g_(j+1) ... g_i, own_j = 1 or 1 - g_j; decay_i = g_0 ... g_i.
template <class T>
void mix_by_gates(const T* gates, index count, bool complement, T* mix, T* decay) {
  for (index i = 0; i < count; ++i) {
    T* const row = mix + i * kernel_chunk;
    if (i == 0) std::fill_n(row, kernel_chunk, T(0));
    const packet<T> g = broadcast<T>(gates[i]);
    for (index n = 0; i > 0 && n < kernel_chunk; n += width<T>)
      store<T>(row + n, mul(g, load<T>(row + n - kernel_chunk)));
    row[i] = complement ? T(1) - gates[i] : T(1);
    decay[i] = i > 0 ? decay[i - 1] * gates[i] : gates[i];
  }
}

}  // namespace attn::detail
