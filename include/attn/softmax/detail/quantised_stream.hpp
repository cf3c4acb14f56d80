// attn: the two products of streaming.hpp with rows in eight bits (quantised.hpp), which are used as they lie in
// memory.
#pragma once

#include <attn/core/detail/row_format.hpp>
#include <attn/softmax/detail/stream_rows.hpp>

// Casts between vectors of the same bits, or to rows that need no alignment, for users who warn of them.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wcast-align"

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// A tile of consecutive rows in codes, none of them in a tail, and the whole blocks that contain it, in one or more
/// pages: row j of the tile is row shift + j of the blocks.
template <class C, class Layout>
struct block_tile {
  static constexpr idx_t block_rows = row_format<C>::rows, most_rows = stream_tile + block_rows;

  Layout layout;
  idx_t rows, cols, block_stride, shift, blocks;
  const C* block[array_size<most_rows / block_rows>];

  template <class Rows>
  block_tile(const Rows& x, idx_t count)
      : layout(x.layout), rows(count), cols(x.cols), block_stride(x.block_stride), shift(x.in_block(0)),
        blocks((shift + count + block_rows - 1) / block_rows) {
    for (idx_t n = 0; n < blocks;) {
      const C* at = x.block(n * block_rows);  // of a page
      const idx_t end = x.pages ? (std::min)(blocks, n + x.pages->run(x.first / block_rows + n)) : blocks;
      for (; n < end; ++n, at += block_stride) block[n] = at;
    }
  }
};
struct quantised_tile : block_tile<std::int8_t, quantised_layout> {
  using block_tile::block_tile;
  const std::int8_t* codes(idx_t n) const { return block[n] + layout.code(0, 0); }

  /// Row n is the reference of block n.
  struct reference_rows {
    const quantised_tile& tile;
    idx_t rows = tile.blocks, cols = tile.cols;
    const Eigen::bfloat16* row(idx_t n) const {
      return reinterpret_cast<const Eigen::bfloat16*>(tile.block[n] + tile.layout.reference());
    }
  };
  reference_rows references() const { return {*this}; }
};
inline quantised_tile tile_of(const quantised_rows& x, idx_t count) { return {x, count}; }

/// scores[r][j] = factor_r |scale_j| (q_r . code_j) + q_r . reference for R queries and N width<float> keys from number
/// `first` of a block on; shifts[r][n] is the product q_r . reference of block n, which keys of a negative scale do
/// without.
template <int R, int N, class T, class C>
ATTN_INLINE void code_scores(const stream_row<T, C>& q, const quantised_tile& k, idx_t block, idx_t first,
                             const T* shifts, T* scores, idx_t stride) {
  constexpr int w = width<float>;
  const std::int8_t* const codes = k.codes(block);
  const idx_t cols = k.cols, all = k.layout.cols / code_group * code_group;
  whole_lanes total[array_size<R>][array_size<N>];
  if constexpr (w < 4) {
    for (int r = 0; r < R; ++r) {
      const std::int16_t* const operand = reinterpret_cast<const std::int16_t*>(q.operands + r * q.operand_stride);
      total[r][0] = whole_lanes{};
      for (idx_t c = 0; c < cols; ++c) total[r][0][0] += operand[c] * k.block[block][k.layout.code(first, c)];
    }
  } else {
    // Independent sequences of multiply-adds for each register of sums: at least eight in all, which hides their
    // latency.
    constexpr int chains = (std::max)(1, 2 / (R * N));
    whole_lanes sums[array_size<R>][array_size<N>][4][array_size<chains>];
    unroll<R>([&](auto r) {
      unroll<N * 4 * chains>([&](auto n) { sums[r][n / (4 * chains)][n / chains % 4][n % chains] = whole_lanes{}; });
    });
    const idx_t place = first / 4;
    const auto columns = [&](idx_t c, auto chain, auto&& load) __attribute__((always_inline)) {
      whole_lanes operand[array_size<R>];
      unroll<R>([&](auto r) { operand[r] = broadcast_fours(q.operands + r * q.operand_stride + c / 2); });
      unroll<4 * N>([&](auto n) {
        const code_pairs x = load(place + n % 4 * 4 + n / 4 * w / 4);
        unroll<R>([&](auto r) {
          whole_lanes& sum = sums[r][n / 4][n % 4][chain];
          sum = add_products(sum, x, operand[r]);
        });
      });
    };
    const auto whole = [&](idx_t c, auto chain) __attribute__((always_inline)) {
      columns(c, chain, [&](idx_t at) { return load_code_pairs(codes + c * quantised_block + at * code_group); });
    };
    const idx_t end = (std::min)(all, round_up(cols, code_group));
    idx_t c = 0;
    for (; c + chains * code_group <= end; c += chains * code_group)
      unroll<chains>([&](auto chain) { whole(c + chain * code_group, chain); });
    for (; c < end; c += code_group) whole(c, std::integral_constant<int, 0>{});
    if (c < cols)  // each group ends in codes of the next key or of the reference: the query has zeros there
      columns(c, std::integral_constant<int, 0>{}, [&](idx_t at) {
        return load_code_groups(
            [&](idx_t n) { return codes + c * quantised_block + (at + n) * (k.layout.cols - c); });
      });
    unroll<R>([&](auto r) {
      unroll<N>([&](auto n) {
        whole_lanes fours[4];
        unroll<4>([&](auto i) {
          fours[i] = sums[r][n][i][0];
          for (int chain = 1; chain < chains; ++chain) fours[i] += sums[r][n][i][chain];
        });
        total[r][n] = sums_of_fours(fours);
      });
    });
  }
  unroll<N>([&](auto n) {
    packet<float> scale;
    std::memcpy(&scale, k.block[block] + 4 * (first + n * w), sizeof scale);
    const whole_lanes without = bits_as<whole_lanes>(scale) >> 31;  // all bits where the sign is negative
    scale = abs(scale);
    unroll<R>([&](auto r) {
      const packet<float> product = mul(whole_to_float(total[r][n]), broadcast<float>(q.factors[r]));
      const auto shift = bits_as<whole_lanes>(broadcast<float>(shifts[r * stream_tile + block])) & ~without;
      store<float>(scores + r * stride + block * quantised_block + first + n * w,
                   fma(product, scale, bits_as<packet<float>>(shift)));
    });
  });
}

/// q . k_j = |scale_j| (q . code_j) + q . reference, the latter where the scale has no sign bit.
template <int R, class T, class C>
void stream_scores(const stream_row<T, C>& q, const quantised_tile& tile, T* scores, stream_prefetcher values) {
  T shifts[array_size<R * stream_tile>];
  row_scores<T, R>(q.data, q.stride, T(1), tile.references(), shifts, stream_prefetcher());
  alignas(64) float of_blocks[array_size<R * quantised_tile::most_rows>];  // where the tile begins within a block
  float* const all = tile.shift == 0 ? scores : of_blocks;
  const idx_t stride = tile.shift == 0 ? stream_tile : quantised_tile::most_rows;
  // Queries at a time, of which each has four registers of sums for width<float> keys.
  constexpr int w = width<float>, most = registers >= 32 ? 6 : 3, together = R > 2 * most ? 2 : R > most ? R / 2 : R,
                N = together == 1 && w > 1 && 2 * w <= quantised_block ? 2 : 1;
  for (idx_t b = 0; b < tile.blocks; ++b) {
    values.fetch(tile.block_stride);
    for (int r = 0; r < R; r += together)
      for (idx_t j = 0; j < quantised_block; j += N * w)
        code_scores<together, N>(q.from(r), tile, b, j, shifts + r * stream_tile, all + r * stride, stride);
  }
  if (tile.shift != 0)
    for (int r = 0; r < R; ++r) std::copy_n(of_blocks + r * stride + tile.shift, tile.rows, scores + r * stream_tile);
}

/// weight_j scale_j, the factor of the codes, in place of weight_j.
template <>
struct value_factors<quantised_tile> {
  static constexpr bool in_codes = true;
  alignas(64) float scales[quantised_tile::most_rows];
  const float* of_rows;

  explicit value_factors(const quantised_tile& tile) {
    for (idx_t n = 0; n < tile.blocks; ++n)
      std::memcpy(scales + n * quantised_block, tile.block[n], quantised_block * sizeof(float));
    of_rows = scales + tile.shift;
    std::fill(scales + tile.shift + tile.rows, std::end(scales), 0.0f);  // rows beyond the last: 0 times anything is 0
  }
  packet<float> times(const packet<float>& weight, idx_t j) const { return mul(weight, load<float>(of_rows + j)); }
};

/// sum_j weight_j v_j = sum_j (weight_j scale_j) code_j, the weights being multiplied with the scales.
template <int R, class T>
void stream_output(const T* weights, const weight_range<T>& range, const T* rescale, const quantised_tile& v,
                   T* out, idx_t out_stride, stream_prefetcher keys) {
  constexpr int w = width<float>;
  static_assert(code_most_of(quantised_tile::most_rows) == code_most);  // sums of a tile fit in integers of 32 bits
  const idx_t count = v.blocks * quantised_block;
  // of whole blocks: rows not in the tile have weight 0
  alignas(64) code_pair pairs[array_size<R>][array_size<quantised_tile::most_rows / 2>];
  float factors[array_size<R>];
  for (int r = 0; r < R; ++r) {
    const T* of_blocks = weights + r * stream_tile;
    alignas(64) T shifted[quantised_tile::most_rows];  // where the tile begins or ends within a block
    if (v.shift != 0 || round_up(v.rows, w) != count) {
      std::fill_n(shifted, count, T(0));
      std::copy_n(of_blocks, v.rows, shifted + v.shift);
      of_blocks = shifted;
    }
    factors[r] = round_to_codes(of_blocks, count, range.largest[r], code_most, pairs[r]);
  }
  const auto columns = [&](idx_t col, T* to, idx_t to_stride, auto vectors) {
    constexpr int N = vectors.value;
    whole_lanes acc[array_size<R>][array_size<N>];
    unroll<R>([&](auto r) { unroll<N>([&](auto n) { acc[r][n] = whole_lanes{}; }); });
    for (idx_t b = 0; b < v.blocks; ++b) {
      const std::int8_t* const codes = v.codes(b) + 2 * col;
      if (col == 0) keys.fetch(v.block_stride);
      for (idx_t j = 0; j < quantised_block / 2; ++j) {
        const code_pair* const weight = pairs[0] + b * (quantised_block / 2) + j;
        whole_lanes pair[array_size<R>];
        unroll<R>([&](auto r) { pair[r] = loaded_once(broadcast_pair(weight[r * std::size(pairs[0])])); });
        unroll<N>([&](auto n) {
          const code_pairs x = load_code_pairs(codes + 2 * (j * v.layout.cols + n * w));
          unroll<R>([&](auto r) { acc[r][n] = add_products(acc[r][n], x, pair[r]); });
        });
      }
    }
    unroll<R>([&](auto r) {
      unroll<N>([&](auto n) {
        const packet<T> before = load<T>(out + r * out_stride + col + n * w);
        store<T>(to + r * to_stride + n * w, fma(before, broadcast<T>(rescale[r]),
                                                 mul(whole_to_float(acc[r][n]), broadcast<float>(factors[r]))));
      });
    });
  };
  // As many as registers have room for the sums; one query reads values of up to 128 columns in order.
  by_columns<R, w, (registers < 32 || R > 6 ? 2 : R > 1 ? 4 : 8)>(v.cols, out, out_stride, columns);
}

}}}  // namespace attn::ATTN_ISA::detail

#pragma GCC diagnostic pop
