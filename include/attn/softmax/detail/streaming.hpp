// attn: exact softmax attention of a few queries, as in decoding: a second kernel beside blockwise.hpp.
//
// With few queries there is nothing to share the packing of the keys with, and the cost is that of reading the keys and
// values once. So they are read in place: scores are dot products along the rows of k, the output a weighted sum
// of the rows of v, both for up to four queries at a time; all query heads of one key head go together.
//
// Measured against packing and blockwise.hpp (one Zen 4 core, float, D 64, 8192 keys, 8 key heads): one query takes
// 0.50 of its time, with 32 query heads 0.39; it stays faster up to about 12 queries per head, with 32 query heads up
// to 6.
//
// Keys are taken in chunks of stream_chunk, each with a softmax of its own, merged in order. Threads may share the
// chunks of one head, and the result does not depend on who took which.
#pragma once

#include <attn/core/detail/kv_memory.hpp>
#include <attn/core/detail/prefetch.hpp>
#include <attn/softmax/detail/blockwise.hpp>

namespace attn::inline ATTN_ISA::detail {

inline constexpr index stream_chunk = 2048;  // keys with a softmax of their own
inline constexpr index stream_tile = 64;     // keys between two looks at the maximum

/// The queries of one key head, and memory to attend them: row r is query r % queries of the query head first_head +
/// r / queries.
template <class T>
struct stream_queries {
  index rows = 0, dim = 0, stride = 0, queries = 0, first_head = 0;
  T* data = nullptr;                     // [rows][stride], scaled, padded with zeros
  T* scores = nullptr;                   // [rows][stream_tile]
  T *keys = nullptr, *values = nullptr;  // a tile in T, padded, where it cannot be read in place

  static stream_queries layout(arena& memory, index rows, index dim, index dim_v) {
    const index stride = round_up(dim, width<T>);
    return {.rows = rows, .dim = dim, .stride = stride, .data = memory.allocate<T>(rows * stride),
            .scores = memory.allocate<T>(rows * stream_tile), .keys = memory.allocate<T>(stream_tile * stride),
            .values = memory.allocate<T>(stream_tile * round_up(dim_v, width<T>))};
  }

  /// Takes `count` rows: the first `per_head` queries of the query heads from `head` on, times `factor`.
  template <class S>
  void begin(const tensor_view<const S>& q, index batch, index head, index count, index per_head, T factor) {
    rows = count;
    queries = per_head;
    first_head = head;
    for (index r = 0; r < rows; ++r) {
      const matrix_view<const S> x = head_of(q, batch, head + r / queries);
      for (index d = 0; d < stride; d += width<T>)
        store<T>(data + r * stride + d,
                 mul(load_part<T>(x.row(r % queries) + d * x.col_stride, x.col_stride, dim - d), broadcast<T>(factor)));
    }
  }
};

/// A tile of rows in T with rows of whole packets: in place where it is that already, else converted into `buffer`.
template <class T, class S>
matrix_view<const T> whole_packets(const matrix_view<const S>& x, index begin, index count, T* buffer) {
  const index stride = round_up(x.cols, width<T>);
  if constexpr (std::same_as<T, S>) {
    if (x.col_stride == 1 && stride == x.cols) return {x.row(begin), count, stride, x.row_stride, 1};
  }
  for (index r = 0; r < count; ++r)
    for (index c = 0; c < stride; c += width<T>)
      store<T>(buffer + r * stride + c, load_part<T>(x.row(begin + r) + c * x.col_stride, x.col_stride, x.cols - c));
  return {buffer, count, stride, stride, 1};
}

/// Rows fetched while others are worked on: values during the scores, the next keys during the output.
using stream_prefetcher = row_prefetcher<1, cache_level::first>;

/// scores[r][j] = q_r . k_j for R rows, a few scores beyond the last key being anything: width<T> sums at a time, each
/// along a register, then all added across at once.
template <class T, int R>
void stream_scores(const T* q, index q_stride, const matrix_view<const T>& k, T* scores, stream_prefetcher values) {
  constexpr int keys = width<T> / R;
  for (index j = 0; j < k.rows; j += keys) {
    values.next(keys);
    packet<T> sums[width<T>];
    unroll<width<T>>([&](auto n) { sums[n] = zero<T>(); });
    const T* row[keys];
    for (int n = 0; n < keys; ++n) row[n] = k.row(std::min(j + n, k.rows - 1));
    for (index d = 0; d < k.cols; d += width<T>)
      unroll<keys>([&](auto n) {
        const packet<T> x = load<T>(row[n] + d);
        unroll<R>([&](auto r) { sums[r * keys + n] = fma(load<T>(q + r * q_stride + d), x, sums[r * keys + n]); });
      });
    alignas(64) T lanes[width<T>];
    store<T>(lanes, sums_across<T>(sums));
    for (int r = 0; r < R; ++r) std::copy_n(lanes + r * keys, keys, scores + r * stream_tile + j);
  }
}

/// out[r] = out[r] * rescale[r] + sum_j weights[r][j] v_j for R rows. Where `zeros` tells that a weight may be 0,
/// values of weight 0 are skipped.
template <class T, int R>
void stream_output(const T* weights, bool zeros, const T* rescale, const matrix_view<const T>& v, T* out,
                   index out_stride, stream_prefetcher keys) {
  const auto columns = [&](index col, auto vectors) {
    constexpr int N = vectors.value;
    packet<T> acc[R][N];
    unroll<R>([&](auto r) { unroll<N>([&](auto n) { acc[r][n] = zero<T>(); }); });
    for (index j = 0; j < v.rows; ++j) {
      const T* x = v.row(j) + col;
      if (col == 0) keys.next(1);
      unroll<R>([&](auto r) {
        const T weight = weights[r * stream_tile + j];
        if (zeros && weight == T(0)) return;
        unroll<N>([&](auto n) { acc[r][n] = fma(broadcast<T>(weight), load<T>(x + n * width<T>), acc[r][n]); });
      });
    }
    unroll<R>([&](auto r) {
      unroll<N>([&](auto n) {
        T* const o = out + r * out_stride + col + n * width<T>;
        store<T>(o, fma(load<T>(o), broadcast<T>(rescale[r]), acc[r][n]));
      });
    });
  };
  constexpr int most = 4;
  index col = 0;
  for (; col + most * width<T> <= v.cols; col += most * width<T>) columns(col, std::integral_constant<int, most>{});
  for (; col < v.cols; col += width<T>) columns(col, std::integral_constant<int, 1>{});
}

/// Runs f(r, integral_constant<int, R>) over all rows, R at a time: four, then one by one.
template <class T, class F>
void by_rows(index rows, F&& f) {
  constexpr int most = std::min(4, width<T>);
  index r = 0;
  for (; r + most <= rows; r += most) f(r, std::integral_constant<int, most>{});
  for (; r < rows; ++r) f(r, std::integral_constant<int, 1>{});
}

/// Rows below first + i * step are seen by query i.
struct stream_limit {
  index first = 0, step = 0;
  index operator()(index i) const { return first + i * step; }
};

/// Does the mask hide the tile of rows from `begin` on from every query?
template <class T, class Score>
bool hidden_from_all(const stream_queries<T>& q, const index_map& positions, index begin, index count,
                     const score_terms<T, Score>& terms) {
  for (index r = 0; r < q.rows; ++r)
    if (terms.for_head(terms.batch, q.first_head + r / q.queries, terms.query_shift)
            .seen(r % q.queries, count, positions, begin) != keys_seen::none)
      return false;
  return true;
}

/// Takes the queries through rows [begin, end) of k and v, which are at positions[row]; query i sees the rows below
/// limit(i). `terms` is of any head of the batch item.
template <class T, class S, class Score>
void attend_stream(const stream_queries<T>& q, const cache_rows<const S>& k, const cache_rows<const S>& v,
                   const index_map& positions, index begin, index end, const score_terms<T, Score>& terms,
                   const stream_limit& limit, const online_softmax<T>& state) {
  constexpr T minus_infinity = -std::numeric_limits<T>::infinity();
  for (index count; begin < end; begin += count) {
    const matrix_view<const S> k_rows = k.from(begin), v_rows = v.from(begin);
    count = std::min({stream_tile, end - begin, k_rows.rows});
    const index padded = round_up(count, width<T>), next = begin + count;
    const matrix_view<const S> next_rows = next < end ? k.from(next) : matrix_view<const S>{};
    if (terms.mask && hidden_from_all(q, positions, begin, count, terms)) continue;
    const auto keys = whole_packets<T>(k_rows, 0, count, q.keys);
    by_rows<T>(q.rows, [&](index r, auto R) {
      stream_scores<T, R.value>(q.data + r * q.stride, q.stride, keys, q.scores + r * stream_tile,
                                r == 0 ? stream_prefetcher(v_rows, 0, count) : stream_prefetcher());
    });
    const auto values = whole_packets<T>(v_rows, 0, count, q.values);
    by_rows<T>(q.rows, [&](index r0, auto R) {
      T rescale[R.value];
      bool zeros = false;
      for (index r = r0; r < r0 + R.value; ++r) {
        T* const s = q.scores + r * stream_tile;
        const index i = r % q.queries, seen = std::clamp(limit(i) - begin, index(0), count);
        if (terms.any() && seen > 0)
          terms.for_head(terms.batch, q.first_head + r / q.queries, terms.query_shift)
              .apply(s, seen, i, positions, begin);
        std::fill(s + seen, s + padded, minus_infinity);
        packet<T> highest = broadcast<T>(minus_infinity);
        for (index j = 0; j < padded; j += width<T>) highest = max(highest, load<T>(s + j));
        const T maximum = std::max(state.maximum[r], max_lanes(highest));
        const T reference = maximum == minus_infinity ? T(0) : maximum;
        packet<T> sum = zero<T>(), least = broadcast<T>(T(1));
        for (index j = 0; j < padded; j += width<T>) {
          const packet<T> weight = exp2_weight<T>(sub(load<T>(s + j), broadcast<T>(reference)));
          store<T>(s + j, weight);
          sum = add(sum, weight);
          least = min(least, weight);
        }
        zeros |= !(min_lanes(least) > T(0));
        rescale[r - r0] = std::exp2(state.maximum[r] - reference);
        state.maximum[r] = maximum;
        state.sum[r] = state.sum[r] * rescale[r - r0] + sum_lanes(sum);
      }
      const index fetched = r0 == 0 ? std::min({stream_tile, end - next, next_rows.rows}) : 0;
      stream_output<T, R.value>(q.scores + r0 * stream_tile, zeros, rescale, values, state.row(r0), state.stride,
                                stream_prefetcher(next_rows, 0, fetched));
    });
  }
}

template <class T, class S, class Score>
void attend_stream(const stream_queries<T>& q, const matrix_view<const S>& k, const matrix_view<const S>& v,
                   const index_map& positions, index begin, index end, const score_terms<T, Score>& terms,
                   const stream_limit& limit, const online_softmax<T>& state) {
  attend_stream(q, cache_rows<const S>(k), cache_rows<const S>(v), positions, begin, end, terms, limit, state);
}

}  // namespace attn::inline ATTN_ISA::detail
