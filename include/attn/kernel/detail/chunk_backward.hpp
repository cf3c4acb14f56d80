// attn: one chunk of tokens of kernel attention on the way back: the products its cost goes into.
//
// As in chunk.hpp a token is a lane: [feature][chunk]. S, z are the sums of the keys before the chunk; R, y those of the
// queries after it: R = sum_i phi(q_i) n_i d_out_i^T, y = -sum_i phi(q_i) n_i D_i, n_i = 1 / (phi(q_i)^T z + eps) and
// D_i = d_out_i . out_i. Within the chunk, pairs of a key j and a query i >= j have A_ji = phi(k_j).phi(q_i) and
// G_ji = v_j.d_out_i:
//
//   1. d phi(q_i) = n_i (S d_out_i - D_i z) + sum_j phi(k_j) n_i (G_ji - D_i)       of_sums, pair_product
//   2. d phi(k_j) = R v_j + y               + sum_i phi(q_i) n_i (G_ji - D_i)
//   3. d v_j      = phi(k_j)^T R            + sum_i n_i A_ji d_out_i                rows_of_sums, add_pair_rows
//
// n_i holds all factors of the pair: gates and, where features are exponentials, their scales.
#pragma once

#include <attn/kernel/detail/chunk.hpp>

namespace attn::inline ATTN_ISA::detail {

/// Rows fetched while one tile of a product with sums is computed: there are two such products a chunk.
inline constexpr index rows_per_sums_tile = rows_per_tile / 2;

/// body(r, t, r * kernel_chunk + t) for every packet of `rows` rows.
template <class T, class Body>
ATTN_INLINE void each_packet(index rows, index lanes, Body&& body) {
  for (index r = 0; r < rows; ++r)
    for (index t = 0; t < lanes; t += width<T>) body(r, t, r * kernel_chunk + t);
}

/// S [feature][value] as left operand, where it lies: in panels.
template <class T>
struct sums_operand {
  const T* data;
  index panel;
  ATTN_INLINE T at(int m, index k) const {
    constexpr index wide = panel_width<T>;
    return data[k / wide * panel + k % wide + m * wide];
  }
};

/// to[r][t] = sum over d of S[r][d] columns[d][t].
template <class T>
void of_sums(const kernel_sums<T>& sums, const T* columns, index lanes, T* to, row_prefetcher<>& prefetch) {
  for (index r = 0; r < sums.features; r += tile_rows)
    for (index t = 0; t < lanes; t += panel_width<T>) {
      prefetch.next(rows_per_sums_tile);
      with_tile_height(std::min<index>(tile_rows, sums.features - r), [&](auto M) {
        tile_product<T, M.value, 2, kernel_chunk>(
            sums_operand<T>{sums.values + r * panel_width<T>, sums.rows() * panel_width<T>}, columns + t, sums.dim_v,
            [&](auto m, auto half, const auto& x) { store<T>(to + (r + m) * kernel_chunk + t + half * width<T>, x); });
      });
    }
}

/// to[t][d] = sum over r of features[r][t] R[r][d], rows `stride` apart.
template <class T>
void rows_of_sums(const kernel_sums<T>& sums, const T* features, index count, T* to, index stride,
                  row_prefetcher<>& prefetch) {
  for (index t = 0; t < count; t += tile_rows)
    for (index col = 0; col < sums.dim_v; col += panel_width<T>) {
      prefetch.next(rows_per_sums_tile);
      with_tile_height(std::min<index>(tile_rows, count - t), [&](auto M) {
        tile_product<T, M.value, 2>(left_operand<T, 1, kernel_chunk>{features + t}, sums.panel(col), sums.features,
                                    [&](auto m, auto half, const auto& x) {
                                      store<T>(to + (t + m) * stride + col + half * width<T>, x);
                                    });
      });
    }
}

/// pairs[j][i] = sum over k < depth of of_keys[k][j] of_queries[k][i] for j < count and the lanes from j on: the pairs of
/// a key and the queries that see it.
template <class T>
void pair_sums(const T* of_keys, const T* of_queries, index depth, index count, T* pairs) {
  for (index j = 0; j < count; j += tile_rows)
    for (index i = j / panel_width<T> * panel_width<T>; i < count; i += panel_width<T>)
      with_tile_height(std::min<index>(tile_rows, count - j), [&](auto M) {
        tile_product<T, M.value, 2, kernel_chunk>(
            left_operand<T, 1, kernel_chunk>{of_keys + j}, of_queries + i, depth,
            [&](auto m, auto half, const auto& x) { store<T>(pairs + (j + m) * kernel_chunk + i + half * width<T>, x); });
      });
}

/// Of which tokens a product over the pairs of a chunk takes its sums, for each lane.
enum class pair_side {
  keys_before,    // lanes are queries: keys up to the lane
  queries_after,  // lanes are keys: queries from the lane on
};

/// to[r][t] += factor[r][t] sum over u of features[r][u] pairs[u][t], u up to t or from t on; pairs on the other side are
/// 0, and with `finite` features, 0 times them is 0. Without a factor, 1.
template <pair_side Side, class T>
void pair_product(const T* features, index rows, const T* pairs, index count, bool finite, const T* factor, T* to) {
  constexpr index wide = panel_width<T>;
  const auto put = [&](index at, const packet<T>& x) {
    store<T>(to + at, factor ? fma(load<T>(factor + at), x, load<T>(to + at)) : add(load<T>(to + at), x));
  };
  if (finite) {
    for (index t = 0; t < count; t += wide) {
      const index begin = Side == pair_side::keys_before ? 0 : t;
      const index end = Side == pair_side::keys_before ? std::min(t + wide, count) : count;
      for (index r = 0; r < rows; r += tile_rows)
        with_tile_height(std::min<index>(tile_rows, rows - r), [&](auto M) {
          tile_product<T, M.value, 2, kernel_chunk>(
              left_operand<T, kernel_chunk, 1>{features + r * kernel_chunk + begin}, pairs + begin * kernel_chunk + t,
              end - begin, [&](auto m, auto half, const auto& x) {
                put((r + m) * kernel_chunk + t + half * width<T>, x);
              });
        });
    }
    return;
  }
  // Lane by lane, without the others: the same sums, to the last bit.
  alignas(64) T position[kernel_chunk];
  for (int t = 0; t < kernel_chunk; ++t) position[t] = static_cast<T>(t);
  for (index t = 0; t < count; t += width<T>) {
    const index begin = Side == pair_side::keys_before ? 0 : t;
    const index end = Side == pair_side::keys_before ? std::min<index>(t + width<T>, count) : count;
    for (index r = 0; r < rows; ++r) {
      packet<T> sum = zero<T>();
      for (index u = begin; u < end; ++u) {
        const packet<T> lane = load<T>(position + t), other = broadcast<T>(position[u]);
        const packet<T> next = fma(broadcast<T>(features[r * kernel_chunk + u]), load<T>(pairs + u * kernel_chunk + t), sum);
        sum = Side == pair_side::keys_before ? if_less(lane, other, sum, next) : if_less(other, lane, sum, next);
      }
      put(r * kernel_chunk + t, sum);
    }
  }
}

/// to[j][d] += sum over i >= j of pairs[j][i] values[i][d], values in panels.
template <class T>
void add_pair_rows(const T* pairs, const T* values, index dim_v, index count, bool finite, T* to, index stride) {
  constexpr index wide = panel_width<T>;
  for (index col = 0; col < dim_v; col += wide) {
    const T* const panel = values + col * kernel_chunk;
    for (index j = 0; j < count && finite; j += tile_rows)
      with_tile_height(std::min<index>(tile_rows, count - j), [&](auto M) {
        tile_product<T, M.value, 2>(left_operand<T, kernel_chunk, 1>{pairs + j * kernel_chunk + j}, panel + j * wide,
                                    count - j, [&](auto m, auto half, const auto& x) {
                                      T* const at = to + (j + m) * stride + col + half * width<T>;
                                      store<T>(at, add(load<T>(at), x));
                                    });
      });
    for (index j = 0; j < count && !finite; ++j)
      unroll<2>([&](auto half) {
        packet<T> x = zero<T>();
        for (index i = j; i < count; ++i)
          x = fma(broadcast<T>(pairs[j * kernel_chunk + i]), load<T>(panel + i * wide + half * width<T>), x);
        T* const at = to + j * stride + col + half * width<T>;
        store<T>(at, add(load<T>(at), x));
      });
  }
}

/// to[i][j] = pairs[j][i] for i >= j and the lanes of its panel, which are 0.
template <class T>
void transpose_pairs(const T* pairs, index count, T* to) {
  constexpr index w = width<T>;
  for (index j = 0; j < count; j += w)
    for (index i = j / panel_width<T> * panel_width<T>; i < count; i += w) {
      packet<T> square[w];
      for (index n = 0; n < w; ++n) square[n] = load<T>(pairs + (j + n) * kernel_chunk + i);
      transpose<T>(square);
      for (index n = 0; n < w; ++n) store<T>(to + (i + n) * kernel_chunk + j, square[n]);
    }
}

/// to[j][i] = factors[i][j] for j <= i and the lanes before it in its vector.
template <class T>
void transpose_factors(const T* factors, index count, T* to) {
  constexpr index w = width<T>;
  for (index i = 0; i < count; i += w)
    for (index j = 0; j <= i; j += w) {
      packet<T> square[w];
      for (index n = 0; n < w; ++n) square[n] = load<T>(factors + (i + n) * kernel_chunk + j);
      transpose<T>(square);
      for (index n = 0; n < w; ++n) store<T>(to + (j + n) * kernel_chunk + i, square[n]);
    }
}

/// dot[t] = sum over r < rows of x[r][t] y[r][t].
template <class T>
void dot_features(const T* x, const T* y, index rows, index lanes, T* dot) {
  for (index t = 0; t < lanes; t += width<T>) {
    packet<T> even = zero<T>(), odd = zero<T>();
    const auto term = [&](index r, const packet<T>& sum) {
      return fma(load<T>(x + r * kernel_chunk + t), load<T>(y + r * kernel_chunk + t), sum);
    };
    for (index r = 0; r + 1 < rows; r += 2) even = term(r, even), odd = term(r + 1, odd);
    if (rows % 2) even = term(rows - 1, even);
    store<T>(dot + t, add(even, odd));
  }
}

/// size[t] = sum over r < rows of |x[r][t]|.
template <class T>
void row_sizes(const T* x, index rows, T* size) {
  std::fill_n(size, kernel_chunk, T(0));
  for (index r = 0; r < rows; ++r)
    for (index t = 0; t < kernel_chunk; t += width<T>)
      store<T>(size + t, add(load<T>(size + t), abs(load<T>(x + r * kernel_chunk + t))));
}

/// Is every number of the first `lanes` of each row finite?
template <class T>
bool all_finite(const T* rows, index count, index lanes) {
  packet<T> trace = zero<T>();  // 0 * x is NaN for an x that is not finite, and stays
  for (index r = 0; r < count; ++r)
    for (index t = 0; t < lanes; t += width<T>) trace = fma(load<T>(rows + r * kernel_chunk + t), zero<T>(), trace);
  return sum_lanes(trace) == T(0);
}

}  // namespace attn::inline ATTN_ISA::detail
