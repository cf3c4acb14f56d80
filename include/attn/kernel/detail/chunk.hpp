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

/// Step 4. sums = decay * sums + features^T values of `count` tokens; decay[r] of feature r. Lanes from `count` to the
/// next whole vector must be 0.
template <class T>
void add_keys(kernel_sums<T>& sums, const T* features, const T* values, index count, const T* decay,
              row_prefetcher<>& prefetch) {
  constexpr int w = width<T>;
  for (index r = 0; r < sums.features; r += w) {
    packet<T> totals[w];
    for (int i = 0; i < w; ++i) {
      const T* row = features + std::min(r + i, sums.features - 1) * kernel_chunk;
      packet<T> sum = load<T>(row);
      for (index t = w; t < count; t += w) sum = add(sum, load<T>(row + t));
      totals[i] = sum;
    }
    T* const z = sums.weights + r;
    store<T>(z, fma(load<T>(z), load<T>(decay + r), sums_across<T>(totals)));
  }
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

/// A smaller denominator counts as 0, and the row is 0: it has lost its digits, and its inverse could overflow.
template <class T>
inline constexpr T least_denominator = 16 * std::numeric_limits<T>::min();

/// What a tile of queries reads. Arrays of one number per query are [kernel_chunk].
template <class T>
struct chunk_view {
  const kernel_sums<T>* sums = nullptr;  // null: nothing came before
  const T* q_state = nullptr;            // features of the queries, for the sums
  const T* state_factor = nullptr;
  index keys = 0;            // of the chunk itself; 0: no triangle
  const T* q_own = nullptr;  // features of the queries, for the keys of the chunk
  const T* k_own = nullptr;  // and of those keys
  const T* own_factor = nullptr;
  const T* pair_factor = nullptr;  // [query][key], null: all 1
  const T* values = nullptr;       // panels [kernel_chunk][panel_width]
  bool finite = true;              // every value is
  const T* eps = nullptr;          // added to the denominator
  bool normalise = true;
  index features = 0, dim_v = 0;
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
void own_weights(const chunk_view<T>& c, index r0, index rows, T* weights, T* sums) {
  const index limit = std::min(r0 + rows, c.keys);
  for (index n = 0; n < limit; n += panel_width<T>)
    with_tile_height(rows, [&](auto M) {
      tile_product<T, M.value, 2, kernel_chunk>(
          left_operand<T, 1, kernel_chunk>{c.q_own + r0}, c.k_own + n, c.features,
          [&](auto m, auto half, const auto& x) { store<T>(weights + m * kernel_chunk + n + half * width<T>, x); });
    });
  const index padded = round_up(limit, width<T>);
  for (index m = 0; m < rows; ++m) {
    T* const row = weights + m * kernel_chunk;
    const index seen = std::min(r0 + m + 1, c.keys);
    if (c.pair_factor)
      for (index n = 0; n < seen; n += width<T>)
        store<T>(row + n, mul(load<T>(row + n), load<T>(c.pair_factor + (r0 + m) * kernel_chunk + n)));
    std::fill(row + seen, row + padded, T(0));
    packet<T> sum = zero<T>();
    for (index n = 0; n < seen; n += width<T>) sum = add(sum, load<T>(row + n));
    sums[m] = sum_lanes(sum);
  }
}

/// Rows [r0, r0 + rows) of the chunk, rows <= tile_rows, into out [tile_rows][stride], and their denominators den[m].
/// `weights` is a scratch tile [tile_rows][kernel_chunk].
template <class T>
void chunk_tile(const chunk_view<T>& c, const T* state_den, index r0, index rows, T* weights, T* den, T* out,
                index stride) {
  alignas(64) T own_sum[tile_rows] = {}, state_part[tile_rows] = {}, own_part[tile_rows] = {};
  const index limit = std::min(r0 + rows, c.keys);
  if (c.keys > 0) own_weights(c, r0, rows, weights, own_sum);
  for (index m = 0; m < rows; ++m) {
    const T a = c.sums ? c.state_factor[r0 + m] : T(0), b = c.keys > 0 ? c.own_factor[r0 + m] : T(0);
    den[m] = (c.sums ? a * state_den[r0 + m] : T(0)) + (c.keys > 0 ? b * own_sum[m] : T(0));
    const T whole = den[m] + c.eps[r0 + m];
    const T normal = !c.normalise ? T(1) : std::abs(whole) < least_denominator<T> ? T(0) : T(1) / whole;
    state_part[m] = a * normal;
    own_part[m] = b * normal;
  }
  for (index col = 0; col < c.dim_v; col += panel_width<T>) {
    with_tile_height(rows, [&](auto M) {
      if (c.sums)
        tile_product<T, M.value, 2>(left_operand<T, 1, kernel_chunk>{c.q_state + r0}, c.sums->panel(col), c.features,
                                    [&](auto m, auto half, const auto& x) {
                                      store<T>(out + m * stride + col + half * width<T>,
                                               mul(x, broadcast<T>(state_part[m])));
                                    });
      else
        for (index m = 0; m < rows; ++m) std::fill_n(out + m * stride + col, panel_width<T>, T(0));
      if (limit > 0 && c.finite)
        tile_product<T, M.value, 2>(left_operand<T, kernel_chunk, 1>{weights}, c.values + col * kernel_chunk, limit,
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
                    load<T>(c.values + col * kernel_chunk + n * panel_width<T> + half * width<T>), x);
          T* const o = out + m * stride + col + half * width<T>;
          store<T>(o, fma(x, broadcast<T>(own_part[m]), load<T>(o)));
        });
  }
}

}  // namespace attn::inline ATTN_ISA::detail
