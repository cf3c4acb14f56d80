// attn: products of bf16 numbers, summed in float.
//
// An operand of such a product is a bf16_pair: two neighbours along the depth k, the first in the lower half. One
// instruction multiplies width<float> pairs of both operands and adds each pair's two products to a float:
//
//   make     instruction                       compile with
//   avx512   vdpbf16ps                         -mavx512bf16 (Zen 4, Cooper Lake, Sapphire Rapids and later)
//   neon     bfdot                             -march=armv8.6-a, or +bf16
//   model    plain multiply-adds               -DATTN_BF16_MODEL: for tests, on any machine
//   none     numbers are converted to float    anything else
//
// A product of two bf16 numbers is exact in float; sums are rounded as the instruction does.
#pragma once

#include <attn/core/detail/simd.hpp>

#if defined(ATTN_BF16_MODEL)
#elif defined(__AVX512BF16__) && defined(EIGEN_VECTORIZE_AVX512)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && defined(EIGEN_VECTORIZE_NEON)
#include <arm_neon.h>
#endif

// Casts between vectors of the same bits, or to rows that need no alignment, for users who warn of them.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wold-style-cast"

namespace attn { inline namespace ATTN_ISA { namespace detail {

enum class bf16_make { none, avx512, neon, model };
#if defined(ATTN_BF16_MODEL)
inline constexpr bf16_make bf16_products = bf16_make::model;
#elif defined(__AVX512BF16__) && defined(EIGEN_VECTORIZE_AVX512)
inline constexpr bf16_make bf16_products = bf16_make::avx512;
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && defined(EIGEN_VECTORIZE_NEON)
inline constexpr bf16_make bf16_products = bf16_make::neon;
#else
inline constexpr bf16_make bf16_products = bf16_make::none;
#endif

/// Two numbers of an operand. If their count is odd, the last pair has a zero.
struct bf16_pair {
  std::uint32_t bits;
};

template <>
struct packet_of<bf16_pair> {
  using type = packet<float>;
};

/// The type that operands of a product are packed as, the type of its sums, and how many numbers along the depth a
/// given number of operands holds.
template <class P>
struct operand {
  using sum_type = P;
  static constexpr int numbers = 1, operands = 1;
};
template <>
struct operand<bf16_pair> {
  using sum_type = float;
  static constexpr int numbers = 2, operands = 1;
};
template <class P>
using sum_type = typename operand<P>::sum_type;
template <class P>
inline constexpr int numbers_of = operand<P>::numbers;
/// Number of operands that hold n numbers.
template <class P>
constexpr idx_t operands(idx_t n) {
  return (n + numbers_of<P> - 1) / numbers_of<P> * operand<P>::operands;
}

/// The operands of products of elements of type S.
template <class S>
using product_type = std::conditional_t<std::same_as<S, Eigen::bfloat16> && bf16_products != bf16_make::none, bf16_pair,
                                        compute_type<S>>;

// Packets of pairs ----------------------------------------------------------------------------------------------------

template <class P>
  requires(numbers_of<P> > 1)
ATTN_INLINE packet<P> load(const P* p) {
  packet<P> x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
template <class P>
  requires(numbers_of<P> > 1)
ATTN_INLINE void store(P* p, const packet<P>& x) {
  std::memcpy(p, &x, sizeof x);
}
template <class P>
  requires(numbers_of<P> > 1)
ATTN_INLINE packet<P> broadcast(P x) {
  return broadcast<float>(std::bit_cast<float>(x.bits));
}

using half_lanes = typename lanes_of<std::uint16_t, width<float>>::type;
using word_lanes = typename lanes_of<std::uint32_t, width<float>>::type;

/// bf16 numbers of a packet, rounded to nearest, ties to even; NaN stays NaN.
ATTN_INLINE half_lanes to_bf16(const packet<float>& x) {
#if defined(__AVX512BF16__) && defined(EIGEN_VECTORIZE_AVX512)
  half_lanes numbers = (half_lanes)_mm512_cvtneps_pbh(x);
#if defined(__clang__) && __clang_major__ == 18
  __asm__("" : "+v"(numbers));  // hides that they are bf16 numbers: it has no instruction to join two vectors of those
#endif
  return numbers;
#else
  word_lanes bits;
  std::memcpy(&bits, &x, sizeof x);
  const word_lanes rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, quiet = bits >> 16 | 0x40;
  const word_lanes is_nan = (word_lanes)((bits & 0x7fffffff) > 0x7f800000u);
  return __builtin_convertvector((is_nan & quiet) | (~is_nan & rounded), half_lanes);
#endif
}

template <class S>
ATTN_INLINE half_lanes load_bf16(const S* p) {
  if constexpr (std::same_as<S, Eigen::bfloat16>) {
    half_lanes x;
    std::memcpy(&x, p, sizeof x);
    return x;
  } else {
    return to_bf16(load_as<float>(p));
  }
}

inline std::uint32_t bf16_bits(float x) { return Eigen::numext::bit_cast<std::uint16_t>(Eigen::bfloat16(x)); }
inline std::uint32_t bf16_bits(Eigen::bfloat16 x) { return Eigen::numext::bit_cast<std::uint16_t>(x); }
inline std::uint32_t bf16_bits(Eigen::half x) { return bf16_bits(static_cast<float>(x)); }
template <class S>
bf16_pair make_pair(S first, S second) {
  return {bf16_bits(first) | bf16_bits(second) << 16};
}

/// A mask of the bits of a pair of values: set for the value whose weight is not 0. A value of weight 0 may be any
/// number, NaN included.
template <class P>
ATTN_INLINE std::uint32_t seen_by(P weights) {
  return (weights.bits & 0x7fff ? 0xffffu : 0) | (weights.bits & 0x7fff0000 ? 0xffff0000u : 0);
}

/// Lane n of the result is the pair of lane n of a and of b.
ATTN_INLINE packet<bf16_pair> pair_lanes(const half_lanes& a, const half_lanes& b) {
  const word_lanes pairs = __builtin_convertvector(a, word_lanes) | __builtin_convertvector(b, word_lanes) << 16;
  packet<bf16_pair> x;
  std::memcpy(&x, &pairs, sizeof x);
  return x;
}

/// Whether sums of type T can be sums of products of pairs, as for bf16 elements.
template <class T>
inline constexpr bool has_pairs = std::same_as<T, float> && bf16_products != bf16_make::none;

/// Rows 2 n and 2 n + 1 of x [rows][stride], with the first `lanes` numbers in use, as pairs [n][stride]; if the number
/// of rows is odd, the last one is paired with zeros.
inline void rows_to_pairs(const float* x, idx_t rows, idx_t lanes, idx_t stride, bf16_pair* pairs) {
  for (idx_t r = 0; r < rows; r += 2, x += 2 * stride, pairs += stride)
    for (idx_t n = 0; n < lanes; n += width<float>)
      store<bf16_pair>(pairs + n, pair_lanes(to_bf16(load<float>(x + n)),
                                             r + 1 < rows ? to_bf16(load<float>(x + stride + n)) : half_lanes{}));
}
/// `count` numbers, rounded up to whole packets, as pairs of neighbours.
inline void lanes_to_pairs(const float* x, idx_t count, bf16_pair* pairs) {
  for (idx_t n = 0; n < count; n += width<float>) {
    const half_lanes rounded = to_bf16(load<float>(x + n));
    std::memcpy(reinterpret_cast<std::uint16_t*>(pairs) + n, &rounded, sizeof rounded);
  }
}

/// acc + a b, over operands: a pair's two products are both added.
template <class P>
ATTN_INLINE packet<sum_type<P>> multiply_add(const packet<P>& a, const packet<P>& b, const packet<sum_type<P>>& acc) {
  if constexpr (numbers_of<P> == 1) {
    return fma(a, b, acc);
  } else {
#if defined(ATTN_BF16_MODEL)
    word_lanes x, y;
    std::memcpy(&x, &a, sizeof a), std::memcpy(&y, &b, sizeof b);
    const auto number = [](const word_lanes& bits) {
      packet<float> p;
      std::memcpy(&p, &bits, sizeof p);
      return p;
    };
    const packet<float> low = fma(number(x << 16), number(y << 16), acc);
    return fma(number(x & 0xffff0000), number(y & 0xffff0000), low);
#elif defined(__AVX512BF16__) && defined(EIGEN_VECTORIZE_AVX512)
#if defined(__clang__) && (__clang_major__ == 16 || __clang_major__ == 17)
    packet<P> x = a, y = b;
    __asm__("" : "+v"(x), "+v"(y));  // their optimisers crash where broadcast integers are cast to bf16 numbers
    return _mm512_dpbf16_ps(acc, (__m512bh)x, (__m512bh)y);
#else
    return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
#endif
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && defined(EIGEN_VECTORIZE_NEON)
    return vbfdotq_f32(acc, vreinterpretq_bf16_f32(a), vreinterpretq_bf16_f32(b));
#else
    static_assert(numbers_of<P> == 1, "attn: this build has no products of bf16 numbers");
#endif
  }
}

}}}  // namespace attn::ATTN_ISA::detail

#pragma GCC diagnostic pop
