// attn: rows of keys and values read once, where they lie, for a few queries: the two products of streaming.hpp.
//
//   rows                        queries and weights              sums
//   float, double, half         compute_type                     compute_type
//   bf16                        the same, or bf16 where the processor multiplies pairs (bf16_pair.hpp); in float
//   eight bits (quantised.hpp)  16-bit whole numbers, which err by 2^-16 of the largest; exact
//
// Scores are sums along the rows of k, added across registers at the end; of keys in eight bits 16 lie side by side, and
// nothing is added across. The output is a weighted sum of the rows of v. Both are of R queries at a time.
#pragma once

#include <attn/core/detail/kv_memory.hpp>
#include <attn/core/detail/prefetch.hpp>
#include <attn/core/detail/tile_product.hpp>

namespace attn::inline ATTN_ISA::detail {

/// Rows of C of a call, at most: two such tiles of dim 64 fit a first cache of 32 KiB.
template <class C>
inline constexpr index stream_tile_of = sizeof(C) <= 2 ? 128 : 64;
inline constexpr index stream_tile = 128;  // the largest

/// Rows fetched while others are worked on: values during the scores, the next keys during the output.
using stream_prefetcher = row_prefetcher<1, cache_level::second>;

/// What numbers of queries are multiplied with rows of C as, beside T.
template <class T, class C>
using stream_operand = std::conditional_t<std::same_as<C, std::int8_t>, code_pair,
                                          std::conditional_t<std::same_as<T, double>, T, product_type<C>>>;

/// R queries: row r is data + r * stride, padded with zeros. As operands of rows in fewer bits beside it, and what those
/// have to be multiplied with.
template <class T, class C>
struct stream_row {
  const T* data;
  index stride;
  const stream_operand<T, C>* operands;
  index operand_stride;
  const float* factors;
};

/// scores[r][j] = q_r . k_j for R rows, a few scores beyond the last key being anything: width<T> sums at a time, each
/// along a register, then all added across at once.
template <class P, int R, class Rows>
void row_scores(const P* q, index q_stride, const Rows& k, sum_type<P>* scores, stream_prefetcher values) {
  using T = sum_type<P>;
  constexpr int keys = width<T> / R;
  for (index j = 0; j < k.rows; j += keys) {
    values.next(keys);
    packet<T> sums[width<T>];
    unroll<width<T>>([&](auto n) { sums[n] = zero<T>(); });
    decltype(k.row(0)) row[keys];
    for (int n = 0; n < keys; ++n) row[n] = k.row(std::min(j + n, k.rows - 1));
    for (index d = 0; d < k.cols; d += numbers_of<P> * width<T>)
      unroll<keys>([&](auto n) {
        packet<P> x;
        if constexpr (numbers_of<P> == 1)
          x = load_as<T>(row[n] + d);
        else
          std::memcpy(&x, row[n] + d, sizeof x);
        unroll<R>([&](auto r) {
          sums[r * keys + n] = multiply_add<P>(load<P>(q + r * q_stride + d / numbers_of<P>), x, sums[r * keys + n]);
        });
      });
    alignas(64) T lanes[width<T>];
    store<T>(lanes, sums_across<T>(sums));
    for (int r = 0; r < R; ++r) std::copy_n(lanes + r * keys, keys, scores + r * stream_tile + j);
  }
}

template <int R, class T, class C, class S>
void stream_scores(const stream_row<T, C>& q, const matrix_view<const S>& k, T* scores, stream_prefetcher values) {
  using P = stream_operand<T, C>;
  if constexpr (std::same_as<S, C> && numbers_of<P> > 1)
    if (k.cols % (numbers_of<P> * width<T>) == 0)
      return row_scores<P, R>(q.operands, q.operand_stride, k, scores, values);
  row_scores<T, R>(q.data, q.stride, k, scores, values);
}

/// out[r] = out[r] * rescale[r] + sum_j weights[r][j] v_j for R rows. Where `zeros` tells that a weight may be 0,
/// values of weight 0 are skipped: they may be anything.
template <class T, int R, class Rows>
void row_output(const T* weights, bool zeros, const T* rescale, const Rows& v, T* out, index out_stride,
                stream_prefetcher keys) {
  const auto columns = [&](index col, auto vectors) {
    constexpr int N = vectors.value;
    packet<T> acc[R][N];
    unroll<R>([&](auto r) { unroll<N>([&](auto n) { acc[r][n] = zero<T>(); }); });
    for (index j = 0; j < v.rows; ++j) {
      const auto x = v.row(j) + col;
      if (col == 0) keys.next(1);
      packet<T> value[N];
      unroll<N>([&](auto n) { value[n] = load_as<T>(x + n * width<T>); });
      unroll<R>([&](auto r) {
        const T weight = weights[r * stream_tile + j];
        if (zeros && weight == T(0)) return;
        unroll<N>([&](auto n) { acc[r][n] = fma(broadcast<T>(weight), value[n], acc[r][n]); });
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

/// The same where no weight is 0, by pairs of rows: of two packets of each, columns 2 n go with columns 2 n, and columns
/// 2 n + 1 with their like.
template <int R>
void pair_output(const float* weights, const float* rescale, const matrix_view<const Eigen::bfloat16>& v, float* out,
                 index out_stride, stream_prefetcher keys) {
  constexpr int w = width<float>;
  alignas(64) bf16_pair pairs[R][stream_tile / 2];
  for (int r = 0; r < R; ++r) lanes_to_pairs(weights + r * stream_tile, v.rows, pairs[r]);
  const auto columns = [&](index col, auto vectors) {
    constexpr int N = vectors.value;
    packet<float> even[R][N], odd[R][N];
    unroll<R>([&](auto r) { unroll<N>([&](auto n) { even[r][n] = odd[r][n] = zero<float>(); }); });
    for (index j = 0; j < v.rows; j += 2) {
      if (col == 0) keys.next(2);
      const Eigen::bfloat16* const x = v.row(j) + col;
      const Eigen::bfloat16* const y = j + 1 < v.rows ? v.row(j + 1) + col : nullptr;
      packet<bf16_pair> low[N], high[N];
      unroll<N>([&](auto n) {
        word_lanes a, b{};
        std::memcpy(&a, x + n * 2 * w, sizeof a);
        if (y) std::memcpy(&b, y + n * 2 * w, sizeof b);
        low[n] = (packet<float>)((a & 0xffffu) | b << 16);
        high[n] = (packet<float>)(a >> 16 | (b & 0xffff0000u));
      });
      unroll<R>([&](auto r) {
        const packet<bf16_pair> weight = broadcast<bf16_pair>(pairs[r][j / 2]);
        unroll<N>([&](auto n) {
          even[r][n] = multiply_add<bf16_pair>(low[n], weight, even[r][n]);
          odd[r][n] = multiply_add<bf16_pair>(high[n], weight, odd[r][n]);
        });
      });
    }
    unroll<R>([&](auto r) {
      unroll<N>([&](auto n) {
        constexpr auto first = [](int i) { return i / 2 + i % 2 * width<float>; };
        constexpr auto second = [](int i) { return (width<float> + i) / 2 + i % 2 * width<float>; };
        float* const o = out + r * out_stride + col + n * 2 * w;
        const packet<float> factor = broadcast<float>(rescale[r]);
        store<float>(o, fma(load<float>(o), factor, shuffle<float>(even[r][n], odd[r][n], first)));
        store<float>(o + w, fma(load<float>(o + w), factor, shuffle<float>(even[r][n], odd[r][n], second)));
      });
    });
  };
  constexpr int most = registers >= 32 ? 2 : 1;
  index col = 0;
  for (; col + most * 2 * w <= v.cols; col += most * 2 * w) columns(col, std::integral_constant<int, most>{});
  for (; col < v.cols; col += 2 * w) columns(col, std::integral_constant<int, 1>{});
}

template <int R, class T, class S>
void stream_output(const T* weights, bool zeros, const T* rescale, const matrix_view<const S>& v, T* out,
                   index out_stride, stream_prefetcher keys) {
  if constexpr (numbers_of<stream_operand<T, S>> > 1)
    if (!zeros && v.cols % (2 * width<T>) == 0) return pair_output<R>(weights, rescale, v, out, out_stride, keys);
  row_output<T, R>(weights, zeros, rescale, v, out, out_stride, keys);
}

// Rows in eight bits --------------------------------------------------------------------------------------------------

/// A tile of rows in eight bits that follow one another: runs of rows in one block.
struct quantised_tile {
  const quantised_rows& of;
  index begins[stream_tile / quantised_block + 2] = {}, runs = 0;

  explicit quantised_tile(const quantised_rows& x) : of(x) {
    while (begins[runs] < x.rows) begins[runs + 1] = x.block_end(begins[runs]), ++runs;
  }
  index begin(index run) const { return begins[run]; }
  index count(index run) const { return begins[run + 1] - begins[run]; }
  bool whole(index run) const { return count(run) == quantised_block; }
  void scales(index run, float (&of_block)[quantised_block]) const {
    std::memcpy(of_block, of.block(begin(run)), sizeof of_block);
  }
  const std::int8_t* codes(index run) const { return of.block(begin(run)) + of.layout.code(0, 0); }

  /// Row n is that of run n.
  struct reference_rows {
    const quantised_tile& tile;
    index rows = tile.runs, cols = tile.of.cols;
    const Eigen::bfloat16* row(index n) const { return tile.of.reference(tile.begins[n]); }
  };
  reference_rows references() const { return {*this}; }
};

/// q . code for the 16 keys of a block and R queries.
template <int R>
void block_scores(const code_pair* q, index q_stride, const std::int8_t* codes, index cols, float* scores) {
  constexpr int w = width<float>, chains = R == 1 ? 4 : 2;  // of multiply-adds, for each query
  for (int lane = 0; lane < quantised_block; lane += w) {
    whole_lanes sums[R][chains];
    unroll<R>([&](auto r) { unroll<chains>([&](auto n) { sums[r][n] = whole_lanes{}; }); });
    const auto columns = [&](index c, auto n) {
      const code_pairs x = load_code_pairs(codes + 2 * (c * quantised_block + lane));
      unroll<R>([&](auto r) { sums[r][n] = add_products(sums[r][n], x, broadcast_pair(q[r * q_stride + c])); });
    };
    const index pairs = cols / 2;
    index c = 0;
    for (; c + chains <= pairs; c += chains) unroll<chains>([&](auto n) { columns(c + n, n); });
    for (; c < pairs; ++c) columns(c, std::integral_constant<int, 0>{});
    unroll<R>([&](auto r) {
      for (int n = 1; n < chains; ++n) sums[r][0] += sums[r][n];
      store_whole(scores + r * quantised_block + lane, sums[r][0]);
    });
  }
}

/// q . k_j = scale_j (q . code_j) + q . reference.
template <int R, class T, class C>
void stream_scores(const stream_row<T, C>& q, const quantised_rows& k, T* scores, stream_prefetcher values) {
  const quantised_tile tile(k);
  T shift[R * stream_tile];
  row_scores<T, R>(q.data, q.stride, tile.references(), shift, stream_prefetcher());
  for (index n = 0; n < tile.runs; ++n) {
    values.next(1);
    alignas(64) float scales[quantised_block], all[R * quantised_block];
    tile.scales(n, scales);
    block_scores<R>(q.operands, q.operand_stride, tile.codes(n), k.cols, all);
    const bool whole = tile.whole(n);
    for (int r = 0; r < R; ++r) {
      const packet<float> factor = broadcast<float>(q.factors[r]), more = broadcast<float>(shift[r * stream_tile + n]);
      float* const x = all + r * quantised_block;
      float* const to = scores + r * stream_tile + tile.begin(n);
      for (int i = 0; i < quantised_block; i += width<float>)
        store<float>((whole ? to : x) + i, fma(mul(load<float>(x + i), factor), load<float>(scales + i), more));
      if (!whole) std::copy_n(x + k.in_block(tile.begin(n)), tile.count(n), to);
    }
  }
}

/// sum_j weight_j v_j = sum_j (weight_j scale_j) code_j
template <int R, class T>
void stream_output(const T* weights, bool, const T* rescale, const quantised_rows& v, T* out, index out_stride,
                   stream_prefetcher keys) {
  constexpr int w = width<float>;
  constexpr index blocks = stream_tile / quantised_block + 1;
  const quantised_tile tile(v);
  alignas(64) code_pair pairs[R][blocks * quantised_block / 2];  // of whole blocks: rows beside the tile have weight 0
  float factors[R];
  for (int r = 0; r < R; ++r) {
    alignas(64) float scaled[blocks * quantised_block];
    packet<float> most = zero<float>();
    for (index n = 0; n < tile.runs; ++n) {
      float* const x = scaled + n * quantised_block;
      const float* w_run = weights + r * stream_tile + tile.begin(n);
      if (!tile.whole(n)) {
        std::fill_n(x, quantised_block, 0.0f);
        std::copy_n(w_run, tile.count(n), x + v.in_block(tile.begin(n)));
        w_run = x;
      }
      alignas(64) float scales[quantised_block];
      tile.scales(n, scales);
      for (int i = 0; i < quantised_block; i += w) {
        const packet<float> times = mul(load<float>(w_run + i), load<float>(scales + i));
        most = max(most, times);
        store<float>(x + i, times);
      }
    }
    factors[r] = round_to_codes(scaled, tile.runs * quantised_block, max_lanes(most), code_most, pairs[r]);
  }
  const auto columns = [&](index col, auto vectors) {
    constexpr int N = vectors.value;
    whole_lanes acc[R][N];
    unroll<R>([&](auto r) { unroll<N>([&](auto n) { acc[r][n] = whole_lanes{}; }); });
    for (index b = 0; b < tile.runs; ++b) {
      const std::int8_t* const codes = tile.codes(b) + 2 * col;
      if (col == 0) keys.next(1);
      for (index j = 0; j < quantised_block; j += 2) {
        const code_pair* const weight = pairs[0] + (b * quantised_block + j) / 2;
        whole_lanes pair[R];
        unroll<R>([&](auto r) { pair[r] = broadcast_pair(weight[r * std::size(pairs[0])]); });
        unroll<N>([&](auto n) {
          const code_pairs x = load_code_pairs(codes + j * v.layout.cols + 2 * n * w);
          unroll<R>([&](auto r) { acc[r][n] = add_products(acc[r][n], x, pair[r]); });
        });
      }
    }
    unroll<R>([&](auto r) {
      unroll<N>([&](auto n) {
        alignas(64) float part[w];
        store_whole(part, acc[r][n]);
        T* const o = out + r * out_stride + col + n * w;
        store<T>(o, fma(load<T>(o), broadcast<T>(rescale[r]), mul(load<float>(part), broadcast<float>(factors[r]))));
      });
    });
  };
  constexpr int most = registers >= 32 ? 4 : 2;
  index col = 0;
  for (; col + most * w <= v.cols; col += most * w) columns(col, std::integral_constant<int, most>{});
  for (; col < v.cols; col += w) columns(col, std::integral_constant<int, 1>{});
}

}  // namespace attn::inline ATTN_ISA::detail
