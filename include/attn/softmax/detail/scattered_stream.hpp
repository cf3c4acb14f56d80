// attn: the two products of streaming.hpp with rows in codes in no order: those of lists of single keys, and of windows
// with a dilation. The codes of a row are multiplied as in quantised_stream.hpp and channel_stream.hpp, in the same
// integers; what a block has in common is computed once for adjacent rows of one block.
//
// A row far from the others costs more than its share of a block: a query's product with the reference, or its product
// with the scales, and the bytes of these; and values are multiplied as pairs, of which one has weight 0.
#pragma once

#include <attn/softmax/detail/channel_stream.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <class C>
using codes_layout = std::conditional_t<std::same_as<C, std::int8_t>, quantised_layout, channel_layout<C>>;

/// Rows of codes, none of them in a tail; a part is a run of rows of one block.
template <class C>
struct scattered_rows {
  static constexpr idx_t most = stream_tile_of<C>;

  codes_layout<C> layout;
  idx_t rows = 0, cols = 0, parts = 0;
  const C *block[array_size<most>], *codes[array_size<most>];  // and where those of the row, or of its pair, begin
  idx_t in_block[array_size<most>];
  idx_t part_end[array_size<most>];

  /// The first `count` of x.
  template <class Rows>
  scattered_rows(const Rows& x, const codes_layout<C>& l, idx_t count) : layout(l), rows(count), cols(x.cols) {
    for (idx_t n = 0; n < rows; ++n) {
      block[n] = x.block(n), in_block[n] = x.in_block(n);
      codes[n] = block[n] + first_code(in_block[n]);
      if (n > 0 && block[n] != block[n - 1]) part_end[parts++] = n;
    }
    part_end[parts++] = rows;
  }
  idx_t first_code(idx_t row) const {
    if constexpr (std::same_as<C, std::int8_t>)
      return layout.code(layout.of_keys ? row : row / 2 * 2, 0);
    else
      return layout.code(row, 0).byte;
  }
  idx_t part_begin(idx_t p) const { return p == 0 ? 0 : part_end[p - 1]; }
  const C* part(idx_t p) const { return block[part_begin(p)]; }

  /// The reference, or the offsets, of each part.
  struct common_rows {
    const scattered_rows& of;
    idx_t rows = of.parts, cols = of.cols;
    const Eigen::bfloat16* row(idx_t p) const {
      if constexpr (std::same_as<C, std::int8_t>)
        return reinterpret_cast<const Eigen::bfloat16*>(of.part(p) + of.layout.reference());
      else
        return channel_scales(of.part(p)) + of.layout.cols;
    }
  };
};

// Codes of a row ------------------------------------------------------------------------------------------------------

/// Codes of a key from column c on, of whole registers, or of the last columns, which others follow.
template <bool whole>
ATTN_INLINE code_pairs scattered_codes(const scattered_rows<std::int8_t>& k, idx_t n, idx_t c) {
  if constexpr (whole) return load_code_groups([&](idx_t group) {
    return k.codes[n] + (c + group * code_group) * quantised_block;
  });
  const idx_t last = (k.layout.cols - 1) / code_group * code_group;
  return load_code_groups(
      [&](idx_t group) { return k.block[n] + k.layout.code(k.in_block[n], (std::min)(c + group * code_group, last)); });
}
template <bool whole, channel_coded C>
ATTN_INLINE code_pairs scattered_codes(const scattered_rows<C>& k, idx_t n, idx_t c) {
  using layout = channel_layout<C>;
  constexpr int words = 2 * width<float> / layout::in_word;
  const idx_t last = whole ? (std::numeric_limits<idx_t>::max)() : (k.layout.cols - 1) / layout::in_word;
  return widen_codes<std::uint8_t>(channel_rows<C>::template row_codes<words>(
      [&](idx_t i) { return k.codes[n] + (std::min)(c / layout::in_word + i, last) * 4 * channel_block; }));
}

/// Values of row n from column `col` on, in pairs of rows of which it is one.
ATTN_INLINE code_pairs scattered_pairs(const scattered_rows<std::int8_t>& v, idx_t n, idx_t col) {
  return load_code_pairs(v.codes[n] + 2 * col);
}
template <channel_coded C>
ATTN_INLINE code_pairs scattered_pairs(const scattered_rows<C>& v, idx_t n, idx_t col) {
  return pair_of<C>(load_words<width<float>>(v.codes[n] + 4 * col),
                    static_cast<int>(v.in_block[n] % channel_layout<C>::in_word / 2));
}

// Products ------------------------------------------------------------------------------------------------------------

/// The query as it is multiplied with keys of part p; returns the factors of the sums.
template <int R, class T>
ATTN_INLINE const float* part_operands(const stream_row<T, std::int8_t>& q, const scattered_rows<std::int8_t>&, idx_t,
                                       float*) {
  return q.factors;
}
template <int R, class T, channel_coded C>
ATTN_INLINE const float* part_operands(const stream_row<T, C>& q, const scattered_rows<C>& k, idx_t p, float* factors) {
  scale_operands<R>(q, channel_scales(k.part(p)), k.cols, factors);
  return factors;
}

/// q . k_j for rows in any order.
template <int R, class T, class C>
void stream_scores(const stream_row<T, C>& q, const scattered_rows<C>& k, T* scores, stream_prefetcher) {
  constexpr int w = width<float>, places = static_cast<int>(std::bit_ceil(unsigned(R))), keys = w / places;
  T shifts[array_size<R * stream_tile>];
  row_scores<T, R>(q.data, q.stride, T(1), typename scattered_rows<C>::common_rows{k}, shifts, stream_prefetcher());
  const idx_t whole = k.cols / (2 * w) * (2 * w);
  whole_lanes sums[array_size<w>] = {};
  constexpr std::size_t all = array_size<w>;
  alignas(64) float factor[all] = {}, scale[all] = {}, shift[all] = {}, lanes[all];
  float of_part[array_size<R>];
  idx_t first = 0;  // of the keys whose sums are in `sums`
  for (idx_t p = 0, n = 0; p < k.parts; ++p) {
    const float* const factors = part_operands<R>(q, k, p, of_part);
    for (; n < k.part_end[p]; ++n) {
      whole_lanes sum[array_size<R>];
      unroll<R>([&](auto r) { sum[r] = whole_lanes{}; });
      const auto columns = [&](idx_t c, const code_pairs& x) __attribute__((always_inline)) {
        unroll<R>([&](auto r) {
          sum[r] = add_products(sum[r], x, load_pairs(q.operands + r * q.operand_stride + c / 2));
        });
      };
      for (idx_t c = 0; c < whole; c += 2 * w) columns(c, scattered_codes<true>(k, n, c));
      if (whole < k.cols) columns(whole, scattered_codes<false>(k, n, whole));
      const idx_t at = n - first;
      float size = 1;
      bool shifted = true;
      if constexpr (std::same_as<C, std::int8_t>) {
        const auto given = quantised_scale::of(k.block[n], k.in_block[n]);
        size = given.size(), shifted = given.from_reference();
      }
      for (int r = 0; r < R; ++r) {
        const idx_t lane = r * keys + at;
        sums[lane] = sum[r], factor[lane] = factors[r], scale[lane] = size;
        shift[lane] = shifted ? shifts[r * stream_tile + p] : 0;
      }
      if (at + 1 < keys && n + 1 < k.rows) continue;
      const packet<float> product = mul(whole_to_float(whole_sums_across(sums)), load<float>(factor));
      store<float>(lanes, fma(product, load<float>(scale), load<float>(shift)));
      for (int r = 0; r < R; ++r) std::copy_n(lanes + r * keys, keys, scores + r * stream_tile + first);
      std::fill_n(sums, w, whole_lanes{});
      first = n + 1;
    }
  }
}

/// Weights are rounded to integers, those of rows in eight bits times the rows' scales.
template <channel_coded C>
struct value_factors<scattered_rows<C>> : value_factors<channel_tile<C>> {
  using value_factors<channel_tile<C>>::value_factors;
};
template <>
struct value_factors<scattered_rows<std::int8_t>> {
  static constexpr bool in_codes = true;
  alignas(64) float scales[array_size<scattered_rows<std::int8_t>::most>] = {};

  explicit value_factors(const scattered_rows<std::int8_t>& v) {
    for (idx_t n = 0; n < v.rows; ++n) scales[n] = quantised_scale::of(v.block[n], v.in_block[n]).size();
  }
  packet<float> times(const packet<float>& weight, idx_t j) const { return mul(weight, load<float>(scales + j)); }
};

template <int R, class T, class C>
void stream_output(const T* weights, const weight_range<T>& range, const T* rescale, const scattered_rows<C>& v, T* out,
                   idx_t out_stride, stream_prefetcher) {
  constexpr int w = width<float>;
  constexpr idx_t most = scattered_rows<C>::most;
  constexpr bool scaled = channel_coded<C>;
  // Of each row its weight, in its place of a pair.
  alignas(64) std::int16_t whole[array_size<most>];
  std::int32_t pairs[array_size<R>][array_size<most>];
  float factors[array_size<R>], sums[array_size<R>][array_size<scaled ? most : 1>];
  for (int r = 0; r < R; ++r) {
    const T* const of_row = weights + r * stream_tile;
    factors[r] = round_to_codes(of_row, round_up(v.rows, w), range.largest[r], code_most,
                                reinterpret_cast<code_pair*>(whole));
    for (idx_t n = 0; n < v.rows; ++n)
      pairs[r][n] = v.in_block[n] % 2 == 0 ? whole[n] & 0xffff : std::int32_t(std::uint32_t(whole[n]) << 16);
    if constexpr (scaled)
      for (idx_t p = 0, n = 0; p < v.parts; ++p)
        for (sums[r][p] = 0; n < v.part_end[p]; ++n) sums[r][p] += of_row[n];
  }
  const auto columns = [&](idx_t col, T* to, idx_t to_stride, auto vectors) {
    constexpr int N = vectors.value;
    whole_lanes acc[array_size<R>][array_size<N>];
    const auto clear = [&] { unroll<R * N>([&](auto n) { acc[n / N][n % N] = whole_lanes{}; }); };
    const auto add_row = [&](idx_t row) __attribute__((always_inline)) {
      whole_lanes pair[array_size<R>];
      unroll<R>([&](auto r) { pair[r] = pairs[r][row] - whole_lanes{}; });
      unroll<N>([&](auto n) {
        const code_pairs x = scattered_pairs(v, row, col + n * w);
        unroll<R>([&](auto r) { acc[r][n] = add_products(acc[r][n], x, pair[r]); });
      });
    };
    packet<float> before[array_size<R>][array_size<N>];
    unroll<R * N>([&](auto n) {
      before[n / N][n % N] =
          mul(load<float>(out + n / N * out_stride + col + n % N * w), broadcast<float>(rescale[n / N]));
    });
    const auto sum_of = [&](auto r, auto n) { return mul(whole_to_float(acc[r][n]), broadcast<float>(factors[r])); };
    clear();
    if constexpr (!scaled) {
      for (idx_t row = 0; row < v.rows; ++row) add_row(row);
      unroll<R>([&](auto r) { unroll<N>([&](auto n) { before[r][n] = add(before[r][n], sum_of(r, n)); }); });
    } else {
      for (idx_t p = 0, row = 0; p < v.parts; ++p, clear()) {
        for (; row < v.part_end[p]; ++row) add_row(row);
        const Eigen::bfloat16* const scales = channel_scales(v.part(p)) + col;
        unroll<N>([&](auto n) {
          const packet<float> scale = abs(load_as<float>(scales + n * w)),
                              offset = load_as<float>(scales + v.layout.cols + n * w);
          unroll<R>([&](auto r) {
            before[r][n] = fma(sum_of(r, n), scale, fma(broadcast<float>(sums[r][p]), offset, before[r][n]));
          });
        });
      }
    }
    unroll<R * N>([&](auto n) { store<float>(to + n / N * to_stride + n % N * w, before[n / N][n % N]); });
  };
  by_columns<R, w, R == 1 || registers >= 32 ? 4 : 2>(v.cols, out, out_stride, columns);
}

}}}  // namespace attn::ATTN_ISA::detail
