// attn: the two products of streaming.hpp with rows in codes with a scale for each channel (channel_codes.hpp).
//
// Queries are multiplied with the scales of a block, then rounded to 16-bit integers, once for its channel_block keys;
// the sums of products with values are multiplied with theirs once for each block. Offsets are a product of their own,
// one row a block.
#pragma once

#include <attn/softmax/detail/stream_rows.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// A tile of consecutive rows, none of them in the tail of the memory, and the whole blocks that contain it: row j of the
/// tile is row shift + j of the blocks.
template <class C>
struct channel_tile {
  static constexpr idx_t most_rows = stream_tile + channel_block;

  const channel_rows<C>& of;
  idx_t shift = of.in_block(0), blocks = (shift + of.rows + channel_block - 1) / channel_block;

  explicit channel_tile(const channel_rows<C>& x) : of(x) {}
  const C* block(idx_t n) const { return of.block(0) + n * of.block_stride; }
  const Eigen::bfloat16* scales(idx_t n) const { return channel_scales(block(n)); }
  const Eigen::bfloat16* offsets(idx_t n) const { return scales(n) + of.layout.cols; }
  const C* words(idx_t n) const { return block(n) + 4 * of.layout.cols; }

  /// Row n is the offsets of block n.
  struct offset_rows {
    const channel_tile& tile;
    idx_t rows = tile.blocks, cols = tile.of.cols;
    const Eigen::bfloat16* row(idx_t n) const { return tile.offsets(n); }
  };
};

/// take(integral_constant<int, a>, pairs) for each pair of codes of width<float> words.
template <class C, class Take>
ATTN_INLINE void each_code_pair(const C* words, Take&& take) {
  using layout = channel_layout<C>;
  typename lanes_of<std::uint32_t, width<float>>::type word;
  std::memcpy(&word, words, sizeof word);
  unroll<layout::in_word / 2>(
      [&](auto a) { take(a, bits_as<code_pairs>((word >> (a.value * layout::bits)) & layout::pair_mask)); });
}

/// Rounds the products of a query with scales to integers up to `most`; returns the factor that gives them back. Operands
/// are zero up to a whole word of codes.
template <idx_t In_word>
float round_scaled(const float* q, const Eigen::bfloat16* scales, idx_t cols, std::int32_t most, code_pair* pairs) {
  constexpr int w = width<float>;
  packet<float> size = zero<float>();
  for (idx_t c = 0; c < cols; c += w) size = max(size, abs(mul(load<float>(q + c), load_as<float>(scales + c))));
  const float factor = max_lanes(size) / static_cast<float>(most);
  const float inverse = factor >= std::numeric_limits<float>::min() && std::isfinite(factor) ? 1 / factor : 0;
  auto* const to = reinterpret_cast<std::int16_t*>(pairs);
  for (idx_t c = 0; c < cols; c += w) {
    const packet<float> x = mul(load<float>(q + c), load_as<float>(scales + c));
    const packet<float> shifted = fma(x, broadcast<float>(inverse), broadcast<float>(whole_number));
    const auto whole = __builtin_convertvector(bits_as<whole_lanes>(shifted), typename lanes_of<std::int16_t, w>::type);
    std::memcpy(to + c, &whole, sizeof whole);
  }
  std::fill(to + cols, to + round_up(cols, In_word), std::int16_t(0));
  return factor;
}

/// scores[r][j] = shift_r + factor_r (q_r . code_j) for R queries and N registers of the keys of a block from `first` on.
template <int R, int N, class T, class C>
ATTN_INLINE void channel_scores(const stream_row<T, C>& q, const C* words, idx_t cols, const float* factors,
                                const float* shifts, T* scores, idx_t stride) {
  using layout = channel_layout<C>;
  // Independent sequences of multiply-adds, as in code_scores().
  constexpr int w = width<float>, pairs = layout::in_word / 2, chains = std::clamp(8 / (R * N), 1, pairs);
  whole_lanes sums[array_size<R>][array_size<N>][array_size<chains>];
  unroll<R>([&](auto r) { unroll<N * chains>([&](auto n) { sums[r][n / chains][n % chains] = whole_lanes{}; }); });
  for (idx_t c = 0; c < cols; c += layout::in_word, words += 4 * channel_block)
    unroll<N>([&](auto n) {
      each_code_pair(words + 4 * n * w, [&](auto a, const code_pairs& x) __attribute__((always_inline)) {
        unroll<R>([&](auto r) {
          whole_lanes& sum = sums[r][n][a % chains];
          sum = add_products(sum, x, broadcast_pair(q.operands[r * q.operand_stride + c / 2 + a]));
        });
      });
    });
  unroll<R>([&](auto r) {
    unroll<N>([&](auto n) {
      for (int chain = 1; chain < chains; ++chain) sums[r][n][0] += sums[r][n][chain];
      store<float>(scores + r * stride + n * w, fma(whole_to_float(sums[r][n][0]), broadcast<float>(factors[r]),
                                                    broadcast<float>(shifts[r * stream_tile])));
    });
  });
}

/// q . k_j = (q scales) . code_j + q . offsets.
template <int R, class T, class C>
void stream_scores(const stream_row<T, C>& q, const channel_rows<C>& k, T* scores, stream_prefetcher values) {
  using layout = channel_layout<C>;
  constexpr int w = width<float>, N = 2 * w <= channel_block ? 2 : 1;
  const channel_tile<C> tile(k);
  T shifts[array_size<R * stream_tile>];
  row_scores<T, R>(q.data, q.stride, T(1), typename channel_tile<C>::offset_rows{tile}, shifts, stream_prefetcher());
  alignas(64) float of_blocks[array_size<R * channel_tile<C>::most_rows>];  // where the tile begins within a block
  float* const all = tile.shift == 0 ? scores : of_blocks;
  const idx_t stride = tile.shift == 0 ? stream_tile : channel_tile<C>::most_rows;
  const auto most = static_cast<std::int32_t>(
      std::min<idx_t>(code_most, std::numeric_limits<std::int32_t>::max() / (layout::most * k.cols + 1)));
  for (idx_t b = 0; b < tile.blocks; ++b) {
    values.next(1);
    float factors[array_size<R>];
    for (int r = 0; r < R; ++r) {
      factors[r] = round_scaled<layout::in_word>(q.data + r * q.stride, tile.scales(b), k.cols, most,
                                                 q.operands + r * q.operand_stride);
      if (!std::isfinite(factors[r]) || !std::isfinite(q.factors[r])) factors[r] = std::numeric_limits<T>::quiet_NaN();
    }
    for (idx_t j = 0; j < channel_block; j += N * w)
      channel_scores<R, N>(q, tile.words(b) + 4 * j, k.cols, factors, shifts + b, all + b * channel_block + j, stride);
  }
  if (tile.shift != 0)
    for (int r = 0; r < R; ++r) std::copy_n(of_blocks + r * stride + tile.shift, k.rows, scores + r * stream_tile);
}

/// Weights are rounded to integers, as for rows in eight bits.
template <class C>
struct value_factors<channel_rows<C>> {
  static constexpr bool in_codes = true;
  explicit value_factors(const channel_rows<C>&) {}
  const packet<float>& times(const packet<float>& weight, idx_t) const { return weight; }
};

/// sum_j weight_j v_j = sum over blocks of scales (sum_j weight_j code_j) + offsets sum_j weight_j.
template <int R, class T, class C>
void stream_output(const T* weights, const weight_range<T>& range, const T* rescale, const channel_rows<C>& v, T* out,
                   idx_t out_stride, stream_prefetcher keys) {
  using layout = channel_layout<C>;
  using tile_type = channel_tile<C>;
  constexpr int w = width<float>;
  constexpr idx_t block_pairs = channel_block / 2, word_pairs = layout::in_word / 2;
  static_assert(idx_t(code_most) * layout::most * channel_block < idx_t(1) << 31);
  const tile_type tile(v);
  const idx_t count = tile.blocks * channel_block;
  alignas(64) code_pair pairs[array_size<R>][array_size<tile_type::most_rows / 2>];
  float factors[array_size<R>], sums[array_size<R>][array_size<tile_type::most_rows / channel_block>];
  for (int r = 0; r < R; ++r) {
    const T* of_blocks = weights + r * stream_tile;
    alignas(64) T shifted[tile_type::most_rows];  // where the tile begins or ends within a block
    if (tile.shift != 0 || round_up(v.rows, w) != count) {
      std::fill_n(shifted, count, T(0));
      std::copy_n(of_blocks, v.rows, shifted + tile.shift);
      of_blocks = shifted;
    }
    factors[r] = round_to_codes(of_blocks, count, range.largest[r], code_most, pairs[r]);
    for (idx_t b = 0; b < tile.blocks; ++b) {
      packet<float> sum = zero<float>();
      for (idx_t j = 0; j < channel_block; j += w) sum = add(sum, load<float>(of_blocks + b * channel_block + j));
      sums[r][b] = sum_lanes(sum);
    }
  }
  const auto columns = [&](idx_t col, auto vectors) {
    constexpr int N = vectors.value;
    packet<float> acc[array_size<R>][array_size<N>];
    unroll<R>([&](auto r) {
      unroll<N>([&](auto n) {
        acc[r][n] = mul(load<T>(out + r * out_stride + col + n * w), broadcast<T>(rescale[r]));
      });
    });
    for (idx_t b = 0; b < tile.blocks; ++b) {
      if (col == 0) keys.next(1);
      whole_lanes whole[array_size<R>][array_size<N>];
      unroll<R>([&](auto r) { unroll<N>([&](auto n) { whole[r][n] = whole_lanes{}; }); });
      const C* words = tile.words(b) + 4 * col;
      const code_pair* weight = pairs[0] + b * block_pairs;
      for (idx_t j = 0; j < block_pairs; j += word_pairs, words += 4 * v.layout.cols, weight += word_pairs)
        unroll<N>([&](auto n) {
          each_code_pair(words + 4 * n * w, [&](auto a, const code_pairs& x) __attribute__((always_inline)) {
            unroll<R>([&](auto r) {
              whole[r][n] = add_products(whole[r][n], x, broadcast_pair(weight[r * std::size(pairs[0]) + a]));
            });
          });
        });
      unroll<N>([&](auto n) {
        const packet<float> scale = load_as<float>(tile.scales(b) + col + n * w),
                            offset = load_as<float>(tile.offsets(b) + col + n * w);
        unroll<R>([&](auto r) {
          const packet<float> sum = mul(whole_to_float(whole[r][n]), broadcast<float>(factors[r]));
          acc[r][n] = fma(sum, scale, fma(broadcast<float>(sums[r][b]), offset, acc[r][n]));
        });
      });
    }
    unroll<R>([&](auto r) {
      unroll<N>([&](auto n) { store<T>(out + r * out_stride + col + n * w, acc[r][n]); });
    });
  };
  constexpr int most = registers >= 32 ? 2 : 1;
  idx_t col = 0;
  for (; col + most * w <= v.cols; col += most * w) columns(col, std::integral_constant<int, most>{});
  for (; col < v.cols; col += w) columns(col, std::integral_constant<int, 1>{});
}

}}}  // namespace attn::ATTN_ISA::detail
