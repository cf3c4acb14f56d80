// attn: one chunk of tokens of kernel attention: the products its cost goes into.
//
// Features of a chunk lie transposed, [feature][chunk]: a token is a lane, so maps, norms, maxima over features and
// exponentials are plain vector code, and the same memory serves as left operand of one product and as panel of
// another. With the sums S, z over everything before the chunk and its own features and values:
//
//   1. out_i  = state_factor_i phi(q_i)^T S                                      chunk_tile
//   2.        + own_factor_i sum_{j <= i} pair_factor_ij phi(q_i).phi(k_j) v_j   the triangle, where causal
//   3. divided by the same with ones for values
//   4. S, z   = decay S, z + sum_j phi(k_j) v_j^T                                add_keys
//
// No row depends on a later key: panels hold later keys beside earlier ones, but each in a lane of its own, and what is
// masked is overwritten, not multiplied by 0.
#pragma once

#include <attn/core/detail/prefetch.hpp>
#include <attn/kernel/detail/kernel_sums.hpp>
#include <attn/kernel/detail/stored_rows.hpp>

#include <cmath>

namespace attn::inline ATTN_ISA::detail {

/// Rows fetched while one tile is computed: as many as let all rows of the next chunk come in time.
inline constexpr index rows_per_tile = 6;

/// z = decay z + sum over `count` tokens of features, each times its entry of `ones` where given; decay[r] of feature r.
/// Lanes from `count` to the next whole vector must be 0.
template <class T>
void add_weights(kernel_sums<T>& sums, const T* features, const T* ones, index count, const T* decay) {
  constexpr int w = width<T>;
  for (index r = 0; r < sums.features; r += w) {
    packet<T> totals[w];
    for (int i = 0; i < w; ++i) {
      const T* row = features + std::min(r + i, sums.features - 1) * kernel_chunk;
      packet<T> sum = ones ? mul(load<T>(row), load<T>(ones)) : load<T>(row);
      for (index t = w; t < count; t += w)
        sum = ones ? fma(load<T>(row + t), load<T>(ones + t), sum) : add(sum, load<T>(row + t));
      totals[i] = sum;
    }
    T* const z = sums.weights + r;
    store<T>(z, fma(load<T>(z), load<T>(decay + r), sums_across<T>(totals)));
  }
}

/// S = decay S + features^T values of `count` tokens.
template <class T>
void add_values(kernel_sums<T>& sums, const T* features, const T* values, index count, const T* decay,
                row_prefetcher<>& prefetch) {
  for (index r = 0; r < sums.features; r += tile_rows)
    for (index col = 0; col < sums.dim_v; col += panel_width<T>) {
      prefetch.next(rows_per_tile);
      with_tile_height(std::min<index>(tile_rows, sums.features - r), [&](auto M) {
        T* const to = sums.panel(col) + r * panel_width<T>;
        tile_product<T, M.value, 2>(left_operand<T, kernel_chunk, 1>{features + r * kernel_chunk},
                                    values + col * kernel_chunk, count, [&](auto m, auto half, const auto& x) {
                                      T* const s = to + m * panel_width<T> + half * width<T>;
                                      store<T>(s, fma(load<T>(s), broadcast<T>(decay[r + m]), x));
                                    });
      });
    }
  sums.empty = sums.empty && count == 0;
}

/// Step 4.
template <class T>
void add_keys(kernel_sums<T>& sums, const T* features, const T* values, index count, const T* decay,
              row_prefetcher<>& prefetch) {
  add_weights<T>(sums, features, nullptr, count, decay);
  add_values(sums, features, values, count, decay, prefetch);
}

/// A smaller denominator counts as 0, and the row is 0: it has lost its digits, and its inverse could overflow.
template <class T>
inline constexpr T least_denominator = 16 * std::numeric_limits<T>::min();

/// Scratch memory of one worker: where nothing else is said, one number per token or query of a chunk. Features for the
/// sums (k_phi, q_phi) and for the chunk itself (k_own, q_own) differ where they have log scales.
template <class T>
struct kernel_scratch {
  T *k_phi, *q_phi, *k_own, *q_own, *k_raw, *q_raw;
  T* values;       // panels [kernel_chunk][panel_width]
  T* pair_factor;  // [query][key]
  T *weights, *out;  // of a tile: [tile_rows][kernel_chunk], [tile_rows][stride]
  T *row_decay, *factors, *map;
  T *k_shift, *k_max, *running_max, *gates, *decay, *q_shift, *q_max, *own_max, *den, *state_factor, *own_factor, *eps;
  T* log_weights;
  index stride;

  static kernel_scratch layout(arena& memory, index features, index dim_v, index map_work, bool log_scaled) {
    kernel_scratch s;
    const index phi = (features + tile_rows) * kernel_chunk, lanes = kernel_sums<T>::lanes(features);
    s.stride = round_up(dim_v, panel_width<T>);
    const auto allocate = [&](index count, std::initializer_list<T**> arrays) {
      for (T** each : arrays) *each = memory.allocate<T>(count);
    };
    allocate(phi, {&s.k_phi, &s.q_phi});
    s.k_own = s.k_phi, s.q_own = s.q_phi;
    if (log_scaled) allocate(phi, {&s.k_own, &s.q_own, &s.k_raw, &s.q_raw});
    allocate(kernel_chunk * s.stride, {&s.values});
    allocate(kernel_chunk * kernel_chunk, {&s.pair_factor});
    allocate(tile_rows * kernel_chunk, {&s.weights});
    allocate(tile_rows * s.stride, {&s.out});
    allocate(lanes, {&s.row_decay});
    allocate(2 * lanes, {&s.factors});
    allocate(map_work, {&s.map});
    allocate(kernel_chunk, {&s.k_shift, &s.k_max, &s.running_max, &s.gates, &s.decay, &s.q_shift, &s.q_max, &s.own_max,
                            &s.den, &s.state_factor, &s.own_factor, &s.eps});
    s.log_weights = s.gates;  // features with log scales have no gates
    return s;
  }
};

/// A chunk with gates: pair_factor_ij = own_j g_(j+1) ... g_i, own_j = 1 or 1 - g_j; decay_i = g_0 ... g_i.
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

/// What a tile of queries reads beside the scratch memory.
template <class T>
struct chunk_view {
  const kernel_sums<T>* sums;  // null: nothing came before
  index keys;                  // of the chunk itself; 0: no triangle
  bool weighed;                // the triangle, by pair_factor
  bool finite;                 // every value is
  bool normalise;
  index features, dim_v;
};

/// den[i] = sum over r of features[r][i] z[r] for i < lanes.
template <class T>
void read_weights(const T* features, const T* z, index count, index lanes, T* den) {
  constexpr int packets = kernel_chunk / width<T>, some = packets < 4 ? packets : 4;
  for (index t = 0; t < lanes; t += some * width<T>) {
    packet<T> sum[some];
    for (int n = 0; n < some; ++n) sum[n] = zero<T>();
    for (index r = 0; r < count; ++r)
      for (int n = 0; n < some; ++n)
        sum[n] = fma(load<T>(features + r * kernel_chunk + t + n * width<T>), broadcast<T>(z[r]), sum[n]);
    for (int n = 0; n < some; ++n) store<T>(den + t + n * width<T>, sum[n]);
  }
}

/// weights[m] = pair_factor * (row r0 + m of q_own).(keys up to it), 0 beyond, and their sums.
template <class T>
void own_weights(const chunk_view<T>& c, const kernel_scratch<T>& s, index r0, index rows, T* sums) {
  const index limit = std::min(r0 + rows, c.keys);
  T *const weights = s.weights, *const pair_factor = s.pair_factor;
  for (index n = 0; n < limit; n += panel_width<T>)
    with_tile_height(rows, [&](auto M) {
      tile_product<T, M.value, 2, kernel_chunk>(
          left_operand<T, 1, kernel_chunk>{s.q_own + r0}, s.k_own + n, c.features,
          [&](auto m, auto half, const auto& x) { store<T>(weights + m * kernel_chunk + n + half * width<T>, x); });
    });
  const index padded = round_up(limit, width<T>);
  for (index m = 0; m < rows; ++m) {
    T* const row = weights + m * kernel_chunk;
    const index seen = std::min(r0 + m + 1, c.keys);
    if (c.weighed)
      for (index n = 0; n < seen; n += width<T>)
        store<T>(row + n, mul(load<T>(row + n), load<T>(pair_factor + (r0 + m) * kernel_chunk + n)));
    std::fill(row + seen, row + padded, T(0));
    packet<T> sum = zero<T>();
    for (index n = 0; n < seen; n += width<T>) sum = add(sum, load<T>(row + n));
    sums[m] = sum_lanes(sum);
  }
}

/// Rows [r0, r0 + rows) of the chunk, rows <= tile_rows, into out [tile_rows][stride], and their denominators den[m].
template <class T>
void chunk_tile(const chunk_view<T>& c, const kernel_scratch<T>& s, index r0, index rows, T* den, T* out,
                index stride) {
  alignas(64) T own_sum[tile_rows] = {}, state_part[tile_rows] = {}, own_part[tile_rows] = {};
  const index limit = std::min(r0 + rows, c.keys);
  const T *const weights = s.weights, *const values = s.values;
  if (c.keys > 0) own_weights(c, s, r0, rows, own_sum);
  for (index m = 0; m < rows; ++m) {
    const T a = c.sums ? s.state_factor[r0 + m] : T(0), b = c.keys > 0 ? s.own_factor[r0 + m] : T(0);
    den[m] = (c.sums ? a * s.den[r0 + m] : T(0)) + (c.keys > 0 ? b * own_sum[m] : T(0));
    const T whole = den[m] + s.eps[r0 + m];
    const T normal = !c.normalise ? T(1) : std::abs(whole) < least_denominator<T> ? T(0) : T(1) / whole;
    state_part[m] = a * normal;
    own_part[m] = b * normal;
  }
  for (index col = 0; col < c.dim_v; col += panel_width<T>) {
    with_tile_height(rows, [&](auto M) {
      if (c.sums)
        tile_product<T, M.value, 2>(left_operand<T, 1, kernel_chunk>{s.q_phi + r0}, c.sums->panel(col), c.features,
                                    [&](auto m, auto half, const auto& x) {
                                      store<T>(out + m * stride + col + half * width<T>,
                                               mul(x, broadcast<T>(state_part[m])));
                                    });
      else
        for (index m = 0; m < rows; ++m) std::fill_n(out + m * stride + col, panel_width<T>, T(0));
      if (limit > 0 && c.finite)
        tile_product<T, M.value, 2>(left_operand<T, kernel_chunk, 1>{weights}, values + col * kernel_chunk, limit,
                                    [&](auto m, auto half, const auto& x) {
                                      T* const o = out + m * stride + col + half * width<T>;
                                      store<T>(o, fma(x, broadcast<T>(own_part[m]), load<T>(o)));
                                    });
    });
    if (limit > 0 && !c.finite)  // key by key, without the masked ones: the same sums, to the last bit
      for (index m = 0; m < rows; ++m)
        unroll<2>([&](auto half) {
          packet<T> x = zero<T>();
          for (index n = 0; n < std::min(r0 + m + 1, c.keys); ++n)
            x = fma(broadcast<T>(weights[m * kernel_chunk + n]),
                    load<T>(values + col * kernel_chunk + n * panel_width<T> + half * width<T>), x);
          T* const o = out + m * stride + col + half * width<T>;
          store<T>(o, fma(x, broadcast<T>(own_part[m]), load<T>(o)));
        });
  }
}

}  // namespace attn::inline ATTN_ISA::detail
