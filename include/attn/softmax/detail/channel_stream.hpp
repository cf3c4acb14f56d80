// attn: the two products of streaming.hpp with rows in codes with a scale for each channel (channel_codes.hpp).
//
// Queries are multiplied with the scales of a block, then rounded to 16-bit integers, once for its channel_block keys:
// to 1/32767 of the largest number of the query times the largest scale. The sums of products with values are
// multiplied with theirs once for each block. Offsets are a product of their own, one row a block.
#pragma once

#include <attn/softmax/detail/quantised_stream.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <class C>
struct channel_tile : block_tile<C, channel_layout<C>> {
  using block_tile<C, channel_layout<C>>::block_tile;
  const Eigen::bfloat16* scales(idx_t n) const { return channel_scales(this->block[n]); }
  const Eigen::bfloat16* offsets(idx_t n) const { return scales(n) + this->layout.cols; }
  const C* words(idx_t n) const { return this->block[n] + 4 * this->layout.cols; }

  /// Row n is the offsets of block n.
  struct offset_rows {
    const channel_tile& tile;
    idx_t rows = tile.blocks, cols = tile.cols;
    const Eigen::bfloat16* row(idx_t n) const { return tile.offsets(n); }
  };
};
template <class C>
channel_tile<C> tile_of(const channel_rows<C>& x, idx_t count) {
  return {x, count};
}

/// Code pair a of each word.
template <class C>
ATTN_INLINE code_pairs pair_of(const code_words& x, int a) {
  using layout = channel_layout<C>;
  return bits_as<code_pairs>((x >> (a * layout::bits)) & layout::pair_mask);
}

/// The largest scale of a block.
inline float largest_scale(const Eigen::bfloat16* scales, idx_t cols) {
  packet<float> largest = zero<float>();
  for (idx_t next = 0; next < cols; next += width<float>)
    largest = (max)(largest, abs(load_as<float>(scales + std::min<idx_t>(next, cols - width<float>))));
  return max_lanes(largest);
}
/// scores[r][j] = shift_r + factor_r (q_r . code_j) for R queries and N registers of the keys of a block.
template <int R, int N, class T, class C>
ATTN_INLINE void channel_scores(const stream_row<T, C>& q, const C* words, idx_t cols, const float* factors,
                                const float* shifts, T* scores, idx_t stride) {
  using layout = channel_layout<C>;
  // Independent sequences of multiply-adds, as in code_scores().
  constexpr int w = width<float>, pairs = layout::in_word / 2, chains = std::clamp(8 / (R * N), 1, pairs);
  whole_lanes sums[array_size<R>][array_size<N>][array_size<chains>];
  unroll<R>([&](auto r) { unroll<N * chains>([&](auto n) { sums[r][n / chains][n % chains] = whole_lanes{}; }); });
  for (idx_t c = 0; c < cols; c += layout::in_word, words += 4 * channel_block) {
    code_words word[array_size<N>];
    unroll<N>([&](auto n) { word[n] = load_words<w>(words + 4 * n * w); });
    unroll<pairs>([&](auto a) __attribute__((always_inline)) {
      whole_lanes pair[array_size<R>];
      unroll<R>([&](auto r) { pair[r] = broadcast_pair(q.operands[r * q.operand_stride + c / 2 + a]); });
      unroll<N>([&](auto n) __attribute__((always_inline)) {
        const code_pairs x = pair_of<C>(word[n], a);
        unroll<R>([&](auto r) {
          whole_lanes& sum = sums[r][n][a % chains];
          sum = add_products(sum, x, pair[r]);
        });
      });
    });
  }
  unroll<R>([&](auto r) {
    unroll<N>([&](auto n) {
      for (int chain = 1; chain < chains; ++chain) sums[r][n][0] += sums[r][n][chain];
      store<float>(scores + r * stride + n * w, fma(whole_to_float(sums[r][n][0]), broadcast<float>(factors[r]),
                                                    broadcast<float>(shifts[r * stream_tile])));
    });
  });
}

/// Queries times the scales of a block, as integers, with zeros up to a whole word of codes; and the factors of their
/// products with its codes.
template <int R, class T, class C>
ATTN_INLINE void scale_operands(const stream_row<T, C>& q, const Eigen::bfloat16* scales, idx_t cols, float* factors) {
  constexpr int w = width<float>;
  const float most = largest_scale(scales, cols), inverse_most = most > 0 ? 1 / most : 0;
  const auto whole = static_cast<float>(code_most_of(cols, row_format<C>::largest_code));
  const auto operands = [&](int r) { return reinterpret_cast<std::int16_t*>(q.operands + r * q.operand_stride); };
  packet<float> inverses[array_size<R>];
  unroll<R>([&](auto r) {
    factors[r] = q.factors[r] * most;
    const float exact = q.factors[r] >= (std::numeric_limits<float>::min)() ? inverse_most / q.factors[r] : 0;
    inverses[r] = broadcast<float>(held_inverse(exact, whole * (q.factors[r] * exact * most), whole));
    for (idx_t c = cols; c % channel_layout<C>::in_word != 0; ++c) operands(r)[c] = 0;
  });
  for (idx_t next = 0; next < cols; next += w) {
    const idx_t c = std::min<idx_t>(next, cols - w);
    const packet<float> scale = load_as<float>(scales + c);
    unroll<R>([&](auto r) {
      const packet<float> x = mul(load<float>(q.data + r * q.stride + c), inverses[r]),
                          shifted = fma(x, scale, broadcast<float>(whole_number));
      const auto rounded =
          __builtin_convertvector(bits_as<whole_lanes>(shifted), typename lanes_of<std::int16_t, w>::type);
      std::memcpy(operands(r) + c, &rounded, sizeof rounded);
    });
  }
}

/// q . k_j = (q scales) . code_j + q . offsets.
template <int R, class T, class C>
void stream_scores(const stream_row<T, C>& q, const channel_tile<C>& k, T* scores, stream_prefetcher values) {
  constexpr int w = width<float>, N = 2 * w <= channel_block ? 2 : 1;
  T shifts[array_size<R * stream_tile>];
  row_scores<T, R>(q.data, q.stride, T(1), typename channel_tile<C>::offset_rows{k}, shifts, stream_prefetcher());
  alignas(64) float of_blocks[array_size<R * channel_tile<C>::most_rows>];  // where the tile begins within a block
  float* const all = k.shift == 0 ? scores : of_blocks;
  const idx_t stride = k.shift == 0 ? stream_tile : channel_tile<C>::most_rows;
  for (idx_t b = 0; b < k.blocks; ++b) {
    values.fetch(k.block_stride);
    float factors[array_size<R>];
    scale_operands<R>(q, k.scales(b), k.cols, factors);
    for (idx_t j = 0; j < channel_block; j += N * w)
      channel_scores<R, N>(q, k.words(b) + 4 * j, k.cols, factors, shifts + b, all + b * channel_block + j, stride);
  }
  if (k.shift != 0)
    for (int r = 0; r < R; ++r) std::copy_n(of_blocks + r * stride + k.shift, k.rows, scores + r * stream_tile);
}

/// Weights are rounded to integers, as for rows in eight bits.
template <class C>
struct value_factors<channel_tile<C>> {
  static constexpr bool in_codes = true;
  template <class Rows>
  explicit value_factors(const Rows&) {}
  const packet<float>& times(const packet<float>& weight, idx_t) const { return weight; }
};

/// sum_j weight_j v_j = sum over blocks of scales (sum_j weight_j code_j) + offsets sum_j weight_j.
template <int R, class T, class C>
void stream_output(const T* weights, const weight_range<T>& range, const T* rescale, const channel_tile<C>& v,
                   T* out, idx_t out_stride, stream_prefetcher keys) {
  using layout = channel_layout<C>;
  using tile_type = channel_tile<C>;
  constexpr int w = width<float>;
  constexpr idx_t block_pairs = channel_block / 2, word_pairs = layout::in_word / 2;
  static_assert(idx_t(code_most) * layout::most * channel_block < idx_t(1) << 31);
  const idx_t count = v.blocks * channel_block;
  alignas(64) code_pair pairs[array_size<R>][array_size<tile_type::most_rows / 2>];
  float factors[array_size<R>], sums[array_size<R>][array_size<tile_type::most_rows / channel_block>];
  for (int r = 0; r < R; ++r) {
    const T* of_blocks = weights + r * stream_tile;
    alignas(64) T shifted[tile_type::most_rows];  // where the tile begins or ends within a block
    if (v.shift != 0 || round_up(v.rows, w) != count) {
      std::fill_n(shifted, count, T(0));
      std::copy_n(of_blocks, v.rows, shifted + v.shift);
      of_blocks = shifted;
    }
    factors[r] = round_to_codes(of_blocks, count, range.largest[r], code_most, pairs[r]);
    for (idx_t b = 0; b < v.blocks; ++b) {
      packet<float> sum = zero<float>();
      for (idx_t j = 0; j < channel_block; j += w) sum = add(sum, load<float>(of_blocks + b * channel_block + j));
      sums[r][b] = sum_lanes(sum);
    }
  }
  // Block by block, so that values are read in order.
  const auto columns = [&](idx_t b, idx_t col, T* to, idx_t to_stride, auto vectors) {
    constexpr int N = vectors.value;
    whole_lanes whole[array_size<R>][array_size<N>];
    unroll<R * N>([&](auto n) { whole[n / N][n % N] = whole_lanes{}; });
    const C* words = v.words(b) + 4 * col;
    const code_pair* weight = pairs[0] + b * block_pairs;
    for (idx_t j = 0; j < block_pairs; j += word_pairs, words += 4 * v.layout.cols, weight += word_pairs) {
      code_words word[array_size<N>];
      unroll<N>([&](auto n) { word[n] = load_words<w>(words + 4 * n * w); });
      unroll<word_pairs>([&](auto a) __attribute__((always_inline)) {
        whole_lanes pair[array_size<R>];
        unroll<R>([&](auto r) { pair[r] = loaded_once(broadcast_pair(weight[r * std::size(pairs[0]) + a])); });
        unroll<N>([&](auto n) __attribute__((always_inline)) {
          const code_pairs x = pair_of<C>(word[n], a);
          unroll<R>([&](auto r) __attribute__((always_inline)) {
            whole[r][n] = add_products(whole[r][n], x, pair[r]);
          });
        });
      });
    }
    unroll<N>([&](auto n) __attribute__((always_inline)) {
      const packet<float> scale = load_as<float>(v.scales(b) + col + n * w),
                          offset = load_as<float>(v.offsets(b) + col + n * w);
      unroll<R>([&](auto r) {
        const packet<float> earlier = load<float>(out + r * out_stride + col + n * w),
                            before = b == 0 ? mul(earlier, broadcast<float>(rescale[r])) : earlier,
                            sum = mul(whole_to_float(whole[r][n]), broadcast<float>(factors[r]));
        store<float>(to + r * to_stride + n * w, fma(sum, scale, fma(broadcast<float>(sums[r][b]), offset, before)));
      });
    });
  };
  for (idx_t b = 0; b < v.blocks; ++b) {
    keys.fetch(v.block_stride);
    by_columns<R, w, (registers < 32 || R > 4 ? 2 : R > 1 ? 4 : 8)>(
        v.cols, out, out_stride, [&](idx_t col, T* to, idx_t to_stride, auto vectors) {
          columns(b, col, to, to_stride, vectors);
        });
  }
}

}}}  // namespace attn::ATTN_ISA::detail
