// attn: what a worker of kernel attention keeps for a chunk, and how gates weigh the pairs of its tokens.
#pragma once

#include <attn/kernel/detail/chunk.hpp>

namespace attn::inline ATTN_ISA::detail {

/// Scratch memory of one worker. Features for the sums (k_phi, q_phi) and for the chunk itself (k_own, q_own) differ
/// where they have log scales.
template <class T>
struct kernel_scratch {
  T *k_phi, *q_phi, *k_own, *q_own, *k_raw, *q_raw, *values, *pair_factor, *weights, *out, *row_decay, *factors, *map;
  T *k_shift, *k_max, *running_max, *gates, *decay, *q_shift, *q_max, *own_max, *den, *state_factor, *own_factor, *eps,
      *log_weights;
  index stride;

  static kernel_scratch layout(arena& memory, index features, index dim_v, index map_work, bool log_scaled) {
    kernel_scratch s;
    const index phi = (features + tile_rows) * kernel_chunk, lanes = kernel_sums<T>::lanes(features);
    s.stride = round_up(dim_v, panel_width<T>);
    s.k_phi = memory.allocate<T>(phi);
    s.q_phi = memory.allocate<T>(phi);
    s.k_own = log_scaled ? memory.allocate<T>(phi) : s.k_phi;
    s.q_own = log_scaled ? memory.allocate<T>(phi) : s.q_phi;
    s.k_raw = memory.allocate<T>(log_scaled ? phi : 0);
    s.q_raw = memory.allocate<T>(log_scaled ? phi : 0);
    s.values = memory.allocate<T>(kernel_chunk * s.stride);
    s.pair_factor = memory.allocate<T>(kernel_chunk * kernel_chunk);
    s.weights = memory.allocate<T>(tile_rows * kernel_chunk);
    s.out = memory.allocate<T>(tile_rows * s.stride);
    s.row_decay = memory.allocate<T>(lanes);
    s.factors = memory.allocate<T>(2 * lanes);
    s.map = memory.allocate<T>(map_work);
    for (T** each : {&s.k_shift, &s.k_max, &s.running_max, &s.gates, &s.decay, &s.q_shift, &s.q_max, &s.own_max, &s.den,
                     &s.state_factor, &s.own_factor, &s.eps})
      *each = memory.allocate<T>(kernel_chunk);
    s.log_weights = s.gates;  // features with log scales have no gates
    return s;
  }
};

/// Pair factors of a chunk with gates: pair_factor_ij = own_j g_(j+1) ... g_i, own_j = 1 or 1 - g_j; decay_i = g_0 ...
/// g_i.
template <class T>
void gate_factors(const T* gates, index count, bool complement, T* pair_factor, T* decay) {
  for (index i = 0; i < count; ++i) {
    T* const row = pair_factor + i * kernel_chunk;
    if (i == 0) std::fill_n(row, kernel_chunk, T(0));
    const packet<T> g = broadcast<T>(gates[i]);
    for (index n = 0; i > 0 && n < kernel_chunk; n += width<T>)
      store<T>(row + n, mul(g, load<T>(row + n - kernel_chunk)));
    row[i] = complement ? T(1) - gates[i] : T(1);
    decay[i] = i > 0 ? decay[i - 1] * gates[i] : gates[i];
  }
}

}  // namespace attn::inline ATTN_ISA::detail
