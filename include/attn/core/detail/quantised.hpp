// attn: keys and values in eight bits each, as caches of std::int8_t keep them.
//
//   value t = scale_t * code_t                  code_t whole numbers from -127 to 127
//   key t = reference + scale_t * code_t        where scale_t has no sign bit, and |scale_t| * code_t where it has one
//
// quantised_block keys have a reference in common, the first of them rounded to bf16: neighbouring keys are similar,
// and channels that are large in all of them become small in the differences (the error on the keys of a trained
// model is half of what it is without; values gain nothing). Keys whose largest difference is larger than their
// largest number are stored without the reference, as where a fast rotation turns large channels within a block. A
// stored key depends on itself and on the first key of its block only, so tokens may come one by one or many at
// once. quantised_block rows are one block of bytes:
//
//   float scale[16], std::int8_t code[cols / 8][16][8], bfloat16 reference[cols]  64 + 18 cols bytes, of keys
//   float scale[16], std::int8_t code[16 / 2][cols][2]                            64 + 16 cols, of values
//
// so that scores of keys, or a row of the output, are sums in whole registers of pairs of products of integers: one
// instruction (pmaddwd, vpdpwssd) multiplies and adds 2 width<float> of them. The last columns of keys, where there are
// fewer than 8, are [16][cols % 8]. Key 4 l + n is at place 4 n + l: registers of places 4 n on, n < 4, whose sums are
// added across groups of four lanes, give the scores in the order of the keys. The 8 codes of a key that are adjacent
// are for lists of single keys.
#pragma once

#include <attn/core/detail/simd.hpp>
#include <attn/core/tensor_view.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>

// Casts between vectors of the same bits, or to rows that need no alignment, for users who warn of them.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wold-style-cast"
#pragma GCC diagnostic ignored "-Wcast-align"

namespace attn { inline namespace ATTN_ISA { namespace detail {

inline constexpr idx_t quantised_block = 16;
inline constexpr idx_t code_group = 8;            // adjacent codes of a key
inline constexpr float quantised_most = 1e38f;    // largest number: differences of two are finite
inline constexpr float whole_number = 0x1.8p23f;  // x + whole_number has x, rounded, in its lowest bits

/// Offsets within a block.
struct quantised_layout {
  idx_t cols = 0;
  bool of_keys = false;

  /// What blocks of so many bytes hold.
  static quantised_layout of_bytes(idx_t bytes, bool of_keys) {
    return {(bytes - 4 * quantised_block) / (quantised_block + (of_keys ? 2 : 0)), of_keys};
  }
  idx_t bytes() const { return reference() + (of_keys ? 2 * cols : 0); }
  idx_t code(idx_t row, idx_t col) const {
    if (!of_keys) return 4 * quantised_block + row / 2 * 2 * cols + 2 * col + row % 2;
    const idx_t first = col / code_group * code_group, place = row % 4 * 4 + row / 4;
    return 4 * quantised_block + quantised_block * first + place * (std::min)(code_group, cols - first) + col - first;
  }
  idx_t reference() const { return quantised_block * (4 + cols); }
};

/// The scale of a row. Its sign bit, which of a zero is no number's sign, says that the row is without the reference.
struct quantised_scale {
  std::uint32_t bits;

  static quantised_scale of(const std::int8_t* block, idx_t row) {
    quantised_scale x;
    std::memcpy(&x, block + 4 * row, sizeof x);
    return x;
  }
  float size() const { return std::bit_cast<float>(bits & 0x7fffffffu); }
  bool from_reference() const { return bits >> 31 == 0; }
};

/// `inverse`, by which numbers become integers up to `most`, as the largest of them becomes `code`; a little smaller
/// where the rounding mode would make it a larger one.
inline float held_inverse(float inverse, float code, float most) {
  code *= 1 + 0x1p-20f;
  const bool beyond = whole_number + code > whole_number + most || whole_number - code < whole_number - most;
  return beyond ? inverse * (1 - 0x1p-19f) : inverse;
}

using whole_lanes = typename lanes_of<std::int32_t, width<float>>::type;
using code_pairs = typename lanes_of<std::int16_t, 2 * width<float>>::type;

/// 2 width<float> codes, with a sign or without, as integers of 16 bits. By intrinsics where GCC 12 would convert in
/// several steps.
template <class Code>
using code_bytes = typename lanes_of<Code, 2 * width<float>>::type;
template <class Code>
ATTN_INLINE code_pairs widen_codes(const code_bytes<Code>& codes) {
#if defined(__AVX512BW__) && defined(EIGEN_VECTORIZE_AVX512)
  return (code_pairs)(std::is_signed_v<Code> ? _mm512_cvtepi8_epi16((__m256i)codes)
                                             : _mm512_cvtepu8_epi16((__m256i)codes));
#elif defined(__AVX2__) && defined(EIGEN_VECTORIZE_AVX) && !defined(EIGEN_VECTORIZE_AVX512)
  return (code_pairs)(std::is_signed_v<Code> ? _mm256_cvtepi8_epi16((__m128i)codes)
                                             : _mm256_cvtepu8_epi16((__m128i)codes));
#else
  return __builtin_convertvector(codes, code_pairs);
#endif
}
ATTN_INLINE code_pairs load_code_pairs(const std::int8_t* p) {
  code_bytes<std::int8_t> codes;
  std::memcpy(&codes, p, sizeof codes);
  return widen_codes<std::int8_t>(codes);
}
/// The same of groups of code_group adjacent codes, group n at p(n).
template <class F>
ATTN_INLINE code_pairs load_code_groups(F&& p) {
  if constexpr (width<float> < 4) {
    return load_code_pairs(p(0));
  } else {
    constexpr int count = 2 * width<float> / code_group;
    typename lanes_of<std::uint64_t, count>::type groups{};
    unroll_constants<count>([&](auto n) {
      std::uint64_t group;
      std::memcpy(&group, p(n), sizeof group);
      groups[n.value] = group;
    });
    return widen_codes<std::int8_t>(bits_as<code_bytes<std::int8_t>>(groups));
  }
}

/// width<float> codes, with a sign or without, as numbers. By intrinsics, as above.
template <class Code>
ATTN_INLINE packet<float> load_codes(const Code* p) {
  static_assert(sizeof(Code) == 1);
#if defined(__AVX512F__) && defined(EIGEN_VECTORIZE_AVX512)
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm512_cvtepi32_ps(std::is_signed_v<Code> ? _mm512_cvtepi8_epi32(codes) : _mm512_cvtepu8_epi32(codes));
#elif defined(__AVX2__) && defined(EIGEN_VECTORIZE_AVX) && !defined(EIGEN_VECTORIZE_AVX512)
  const __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return _mm256_cvtepi32_ps(std::is_signed_v<Code> ? _mm256_cvtepi8_epi32(codes) : _mm256_cvtepu8_epi32(codes));
#else
  typename lanes_of<Code, width<float>>::type codes;
  std::memcpy(&codes, p, sizeof codes);
  return bits_as<packet<float>>(__builtin_convertvector(codes, typename lanes_of<float, width<float>>::type));
#endif
}

ATTN_INLINE packet<float> whole_to_float(const whole_lanes& x) {
  return bits_as<packet<float>>(__builtin_convertvector(x, typename lanes_of<float, width<float>>::type));
}

/// The location of blocks of rows in pages of so many blocks.
struct block_pages {
  const idx_t* table = nullptr;
  idx_t blocks = 0, stride = 0;

  idx_t page(idx_t n) const { return table[n / blocks] * stride; }
  idx_t block(idx_t n, idx_t block_stride) const { return page(n) + n % blocks * block_stride; }
  /// How many blocks from block n on are one after another.
  idx_t run(idx_t n) const { return blocks - n % blocks; }
};

/// Consecutive rows of one head, or every step-th of them: the first `cols` columns.
struct quantised_rows {
  const std::int8_t* blocks = nullptr;
  idx_t block_stride = 0;
  quantised_layout layout{};
  idx_t first = 0, rows = 0, cols = 0, step = 1;
  const block_pages* pages = nullptr;  // none: one after another

  const std::int8_t* block(idx_t i) const {
    const idx_t n = (first + i * step) / quantised_block;
    return blocks + (pages ? pages->block(n, block_stride) : n * block_stride);
  }
  idx_t in_block(idx_t i) const { return (first + i * step) % quantised_block; }
  quantised_scale scale(idx_t i) const { return quantised_scale::of(block(i), in_block(i)); }
  const Eigen::bfloat16* reference(idx_t i) const {
    return reinterpret_cast<const Eigen::bfloat16*>(block(i) + layout.reference());
  }

  /// Rows [begin, end) as numbers, `stride` apart.
  void expand(idx_t begin, idx_t end, float* __restrict__ to, idx_t stride) const {
    for (idx_t i = begin; i < end; ++i, to += stride) layout.of_keys ? expand_key(i, to) : expand_value(i, to);
  }

 private:
  void expand_value(idx_t i, float* to) const {
    const idx_t pair = in_block(i) / 2 * 2, odd = in_block(i) % 2;
    const std::int8_t* const codes = block(i) + layout.code(pair, 0);
    const float size = scale(i).size();
    in_packets<width<float>>(cols, to, [&](idx_t c, float* x) {
      const whole_lanes both = (whole_lanes)load_code_pairs(codes + 2 * c);
      store<float>(x, mul(whole_to_float(odd ? both >> 16 : both << 16 >> 16), broadcast<float>(size)));
    }, [&](idx_t c) { return size * static_cast<float>(codes[2 * c + odd]); });
  }
  void expand_key(idx_t i, float* to) const {
    constexpr idx_t some = (std::max)(16, width<float>);  // columns at a time
    const std::int8_t* const from = block(i);
    const idx_t row = in_block(i);
    const quantised_scale given = scale(i);
    const float size = given.size();
    const Eigen::bfloat16* const base = reference(i);
    const whole_lanes kept = whole_lanes{} - static_cast<std::int32_t>(given.from_reference());
    in_packets<some>(cols, to, [&](idx_t c, float* x) {
      std::int8_t codes[some + code_group];
      const idx_t before = c % code_group;
      for (idx_t n = -before; n < some; n += code_group)
        std::memcpy(codes + before + n, from + layout.code(row, c + n), code_group);
      for (idx_t n = 0; n < some; n += width<float>)
        store<float>(x + n, fma(load_codes(codes + before + n), broadcast<float>(size),
                                keep<float>(load_as<float>(base + c + n), kept)));
    }, [&](idx_t c) {
      const float rest = size * static_cast<float>(from[layout.code(row, c)]);
      return given.from_reference() ? rest + static_cast<float>(base[c]) : rest;
    });
  }
};

/// Whether the first row is a number in 16 bits yet (channel_codes.hpp).
constexpr bool in_tail(const quantised_rows&) { return false; }
/// Every step-th of `count` rows.
inline quantised_rows every(quantised_rows x, idx_t step, idx_t count) {
  x.step *= step, x.rows = count;
  return x;
}
template <class S>
matrix_view<S> every(const matrix_view<S>& x, idx_t step, idx_t count) {
  return {x.data, count, x.cols, x.row_stride * step, x.col_stride};
}

/// Stores number(c), c < cols, as row `row` of a block, whose reference it has already.
template <class Number>
void quantise_numbers(const Number& number_of, const quantised_layout& layout, std::int8_t* block, idx_t row) {
  const idx_t cols = layout.cols;
  const Eigen::bfloat16* const base = reinterpret_cast<const Eigen::bfloat16*>(block + layout.reference());
  float most = 0, most_rest = 0;
  for (idx_t c = 0; c < cols; ++c) {
    const float number = number_of(c);
    most = (std::max)(most, std::abs(number));
    if (layout.of_keys) most_rest = (std::max)(most_rest, std::abs(number - static_cast<float>(base[c])));
  }
  const bool from_reference = layout.of_keys && most_rest <= most;
  const float size = (from_reference ? most_rest : most) / 127;
  const quantised_scale scale{std::bit_cast<std::uint32_t>(size) | (layout.of_keys && !from_reference ? 1u << 31 : 0)};
  const float inverse = size >= (std::numeric_limits<float>::min)()
                            ? held_inverse(1 / size, (from_reference ? most_rest : most) * (1 / size), 127)
                            : 0;
  std::memcpy(block + 4 * row, &scale, sizeof scale);
  for (idx_t c = 0; c < cols; ++c) {
    const float rest = number_of(c) - (from_reference ? static_cast<float>(base[c]) : 0);
    block[layout.code(row, c)] = static_cast<std::int8_t>(std::bit_cast<std::int32_t>(rest * inverse + whole_number));
  }
}

/// Stores x, `stride` apart, as row `row` of a block; the first key of a block is the reference.
template <class S>
void quantise_row(const S* x, idx_t stride, const quantised_layout& layout, std::int8_t* block, idx_t row) {
  const auto number = [&](idx_t c) { return static_cast<float>(x[c * stride]); };
  Eigen::bfloat16* const base = reinterpret_cast<Eigen::bfloat16*>(block + layout.reference());
  if (layout.of_keys && row == 0)
    for (idx_t c = 0; c < layout.cols; ++c) base[c] = Eigen::bfloat16(number(c));
  quantise_numbers(number, layout, block, row);
}

/// Moves a row to a row of the same or another block. The first row of a block brings its reference along. Rows keep
/// their codes, but for keys that are differences from another reference than the block's: those are rounded again.
inline void move_quantised_row(const quantised_layout& layout, const std::int8_t* from, idx_t from_row, std::int8_t* to,
                               idx_t row) {
  const quantised_rows source{from, 0, layout, from_row, 1, layout.cols};
  const quantised_scale scale = source.scale(0);
  if (layout.of_keys && from != to) {
    const std::int8_t* const reference = from + layout.reference();
    const std::size_t bytes = 2 * static_cast<std::size_t>(layout.cols);
    if (row == 0) std::memcpy(to + layout.reference(), reference, bytes);
    if (scale.from_reference() && std::memcmp(to + layout.reference(), reference, bytes) != 0) {
      const Eigen::bfloat16* const base = source.reference(0);
      const auto number = [&](idx_t c) {
        return scale.size() * static_cast<float>(from[layout.code(from_row, c)]) + static_cast<float>(base[c]);
      };
      return quantise_numbers(number, layout, to, row);
    }
  }
  std::memcpy(to + 4 * row, &scale, sizeof scale);
  for (idx_t c = 0; c < layout.cols; ++c) to[layout.code(row, c)] = from[layout.code(from_row, c)];
}

// Products ------------------------------------------------------------------------------------------------------------

/// Two adjacent integers of 16 bits, with which codes are multiplied.
struct code_pair {
  std::int16_t first, second;
};
inline constexpr std::int32_t code_most = 32767;

/// The largest such integer of which `count` products with codes up to `largest` can be added without overflow.
constexpr std::int32_t code_most_of(idx_t count, idx_t largest = 127) {
  return static_cast<std::int32_t>(
      std::min<idx_t>(code_most, (std::numeric_limits<std::int32_t>::max)() / (largest * count + 1)));
}

ATTN_INLINE whole_lanes broadcast_pair(code_pair x) { return std::bit_cast<std::int32_t>(x) - whole_lanes{}; }
/// Four pairs, in each group of four lanes.
ATTN_INLINE whole_lanes broadcast_fours(const code_pair* p) {
#if defined(EIGEN_VECTORIZE_AVX512)
  return (whole_lanes)_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__) && defined(EIGEN_VECTORIZE_AVX)
  return (whole_lanes)_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  std::int32_t lanes[width<float>];
  for (int n = 0; n < width<float>; ++n) lanes[n] = std::bit_cast<std::int32_t>(p[n % 4]);
  return bits_as<whole_lanes>(lanes);
#endif
}
ATTN_INLINE whole_lanes load_pairs(const code_pair* p) {
  whole_lanes x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

/// Lanes of both, as shuffle().
template <class F>
ATTN_INLINE whole_lanes shuffle_whole(const whole_lanes& a, const whole_lanes& b, F lane_of) {
  return bits_as<whole_lanes>(shuffle<float>(bits_as<packet<float>>(a), bits_as<packet<float>>(b), lane_of));
}
/// Lane i of the result is the sum of the lanes of x[i], of the first N; x is overwritten.
template <int N = width<float>>
ATTN_INLINE whole_lanes whole_sums_across(whole_lanes (&x)[width<float>]) {
  if constexpr (N > 1) {
    unroll<N / 2>([&](auto n) {
      const whole_lanes a = x[2 * n], b = x[2 * n + 1];
      x[n] = shuffle_whole(a, b, [](int i) { return 2 * i; }) + shuffle_whole(a, b, [](int i) { return 2 * i + 1; });
    });
    whole_sums_across<N / 2>(x);
  }
  return x[0];
}
/// Lane 4 l + n of the result is the sum of lanes 4 l to 4 l + 3 of x[n].
ATTN_INLINE whole_lanes sums_of_fours(const whole_lanes (&x)[4]) {
  const auto pairs = [](const whole_lanes& a, const whole_lanes& b) {
    constexpr auto lane = [](int i, int odd) { return i % 4 / 2 * width<float> + i / 4 * 4 + i % 2 * 2 + odd; };
    return shuffle_whole(a, b, [](int i) { return decltype(lane){}(i, 0); }) +
           shuffle_whole(a, b, [](int i) { return decltype(lane){}(i, 1); });
  };
  return pairs(pairs(x[0], x[1]), pairs(x[2], x[3]));
}

/// sums + x y; both products of a pair are added.
ATTN_INLINE whole_lanes add_products(const whole_lanes& sums, const code_pairs& x, const whole_lanes& pair) {
#if defined(__AVX512VNNI__) && defined(EIGEN_VECTORIZE_AVX512)
  return (whole_lanes)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)x, (__m512i)pair);
#elif defined(__AVX512BW__) && defined(EIGEN_VECTORIZE_AVX512)
  return sums + (whole_lanes)_mm512_madd_epi16((__m512i)x, (__m512i)pair);
#elif defined(__AVX2__) && defined(EIGEN_VECTORIZE_AVX) && !defined(EIGEN_VECTORIZE_AVX512)
  return sums + (whole_lanes)_mm256_madd_epi16((__m256i)x, (__m256i)pair);
#elif defined(EIGEN_VECTORIZE_SSE) && !defined(EIGEN_VECTORIZE_AVX)
  return sums + (whole_lanes)_mm_madd_epi16((__m128i)x, (__m128i)pair);
#else
  const whole_lanes pairs = (whole_lanes)x;
  return sums + (pairs << 16 >> 16) * (pair << 16 >> 16) + (pairs >> 16) * (pair >> 16);
#endif
}

/// `count` numbers, of size up to `largest`, a multiple of width<float>, as integers up to `most`; returns the factor
/// that gives the numbers back, NaN where `largest` is not finite.
inline float round_to_codes(const float* x, idx_t count, float largest, std::int32_t most, code_pair* pairs) {
  const float factor = largest / static_cast<float>(most);
  const float inverse = factor >= (std::numeric_limits<float>::min)() && std::isfinite(factor)
                            ? held_inverse(1 / factor, largest * (1 / factor), static_cast<float>(most))
                            : 0;
  for (idx_t n = 0; n < count; n += width<float>) {
    const packet<float> shifted = fma(load<float>(x + n), broadcast<float>(inverse), broadcast<float>(whole_number));
    const auto whole =
        __builtin_convertvector(bits_as<whole_lanes>(shifted), typename lanes_of<std::int16_t, width<float>>::type);
    std::memcpy(reinterpret_cast<std::int16_t*>(pairs) + n, &whole, sizeof whole);
  }
  return std::isfinite(factor) ? factor : std::numeric_limits<float>::quiet_NaN();
}

}}}  // namespace attn::ATTN_ISA::detail

#pragma GCC diagnostic pop
