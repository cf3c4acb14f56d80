// attn: the one file that touches Eigen's packet layer. A packet<T> is the widest vector of this build (SSE2 to
// AVX-512, NEON, or a single scalar where Eigen does not vectorise); all code that uses it is written once for any
// width.
#pragma once

#include <attn/core/cache_elements.hpp>
#include <attn/core/tensor_view.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__GNUC__)
#define ATTN_INLINE inline __attribute__((always_inline))
#else
#define ATTN_INLINE inline
#endif

// Casts between vectors of the same bits, or to rows that need no alignment, for users who warn of them.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wold-style-cast"

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <class T>
struct packet_of {
  using type = typename Eigen::internal::packet_traits<T>::type;
};
template <class T>
using packet = typename packet_of<T>::type;

/// Lanes of a packet.
template <class T>
inline constexpr int width = Eigen::internal::unpacket_traits<packet<T>>::size;

/// Number of vector registers of the instruction set, which bounds the size of a tile.
inline constexpr int registers = EIGEN_ARCH_DEFAULT_NUMBER_OF_REGISTERS;

template <class T>
ATTN_INLINE packet<T> load(const T* p) {
  return Eigen::internal::ploadu<packet<T>>(p);
}
/// `count` elements from p on, fewer than the packet has lanes; zeros after them, whose memory is not read.
template <class T>
ATTN_INLINE packet<T> load_first(const T* p, idx_t count) {
#if defined(EIGEN_VECTORIZE_AVX512)
  const unsigned taken = (1u << count) - 1;
  if constexpr (std::same_as<T, float> && width<T> == 16)
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>(taken), p);
  if constexpr (std::same_as<T, double> && width<T> == 8)
    return _mm512_maskz_loadu_pd(static_cast<__mmask8>(taken), p);
#elif defined(EIGEN_VECTORIZE_AVX)
  static constexpr std::int32_t ones_then_zeros[] = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};
  const idx_t skipped = 8 - count * static_cast<idx_t>(sizeof(T) / 4);
  const __m256i taken = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(ones_then_zeros + skipped));
  if constexpr (std::same_as<T, float> && width<T> == 8) return _mm256_maskload_ps(p, taken);
  if constexpr (std::same_as<T, double> && width<T> == 4) return _mm256_maskload_pd(p, taken);
#endif
  alignas(64) T lanes[width<T>] = {};
  for (idx_t i = 0; i < count; ++i) lanes[i] = p[i];
  return load<T>(lanes);
}
template <class T>
ATTN_INLINE void store(T* p, const packet<T>& x) {
  Eigen::internal::pstoreu(p, x);
}
template <class T>
ATTN_INLINE packet<T> broadcast(T x) {
  return Eigen::internal::pset1<packet<T>>(x);
}
template <class T>
ATTN_INLINE packet<T> zero() {
  return Eigen::internal::pset1<packet<T>>(T(0));
}
template <class P>
ATTN_INLINE P add(const P& a, const P& b) {
  return Eigen::internal::padd(a, b);
}
template <class P>
ATTN_INLINE P sub(const P& a, const P& b) {
  return Eigen::internal::psub(a, b);
}
template <class P>
ATTN_INLINE P mul(const P& a, const P& b) {
  return Eigen::internal::pmul(a, b);
}
template <class P>
ATTN_INLINE P div(const P& a, const P& b) {
  return Eigen::internal::pdiv(a, b);
}
/// Whether fma() rounds once. Where it does not, a * b is rounded before c is added.
#if defined(EIGEN_HAS_SINGLE_INSTRUCTION_MADD) || defined(EIGEN_VECTORIZE_FMA)
inline constexpr bool fuses_products = true;
#else
inline constexpr bool fuses_products = false;
#endif
/// a * b + c
template <class P>
ATTN_INLINE P fma(const P& a, const P& b, const P& c) {
  return Eigen::internal::pmadd(a, b, c);
}
/// The larger one; a where either is NaN.
template <class P>
ATTN_INLINE P (max)(const P& a, const P& b) {
  return Eigen::internal::pmax(a, b);
}
template <class P>
ATTN_INLINE P (min)(const P& a, const P& b) {
  return Eigen::internal::pmin(a, b);
}
template <class P>
ATTN_INLINE P abs(const P& a) {
  return Eigen::internal::pabs(a);
}
/// The nearest whole number, ties to even.
template <class P>
ATTN_INLINE P round(const P& a) {
  return Eigen::internal::print(a);
}
/// a < b ? x : y, lane by lane.
template <class P>
ATTN_INLINE P if_less(const P& a, const P& b, const P& x, const P& y) {
  return Eigen::internal::pselect(Eigen::internal::pcmp_lt(a, b), x, y);
}
/// Whether a < b in any lane.
template <class P>
ATTN_INLINE bool any_less(const P& a, const P& b) {
  return Eigen::internal::predux_any(Eigen::internal::pcmp_lt(a, b));
}
#ifdef EIGEN_VECTORIZE_AVX512
// Eigen 3.4 makes a vector of the mask, and a mask of the vector.
ATTN_INLINE bool any_less(const __m512& a, const __m512& b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ) != 0; }
ATTN_INLINE bool any_less(const __m512d& a, const __m512d& b) { return _mm512_cmp_pd_mask(a, b, _CMP_LT_OQ) != 0; }
ATTN_INLINE __m512 if_less(const __m512& a, const __m512& b, const __m512& x, const __m512& y) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
ATTN_INLINE __m512d if_less(const __m512d& a, const __m512d& b, const __m512d& x, const __m512d& y) {
  return _mm512_mask_blend_pd(_mm512_cmp_pd_mask(a, b, _CMP_LT_OQ), y, x);
}
#endif
/// a, which is not negative, with the sign of b.
template <class T>
ATTN_INLINE packet<T> with_sign(const packet<T>& a, const packet<T>& b) {
  if constexpr (width<T> == 1)
    return std::copysign(a, b);
  else
    return Eigen::internal::por(a, Eigen::internal::pand(b, broadcast<T>(T(-0.0))));
}
template <class P>
ATTN_INLINE auto sum_lanes(const P& a) {
  return Eigen::internal::predux(a);
}
template <class P>
ATTN_INLINE auto min_lanes(const P& a) {
  return Eigen::internal::predux_min(a);
}
template <class P>
ATTN_INLINE auto max_lanes(const P& a) {
  return Eigen::internal::predux_max(a);
}

template <class T>
struct float_bits;
template <>
struct float_bits<float> {
  using integer = std::int32_t;
  static constexpr int mantissa = 23, bias = 127;
};
template <>
struct float_bits<double> {
  using integer = std::int64_t;
  static constexpr int mantissa = 52, bias = 1023;
};

/// The compiler's own vector of N numbers, for operations that Eigen's packets do not have. Packets of several lanes
/// convert to and from it; of one lane, which are numbers, by bits_as.
template <class Integer, int N>
struct lanes_of {
  typedef Integer type __attribute__((vector_size(N * sizeof(Integer))));
};

/// The same bits as another vector or number.
template <class To, class From>
ATTN_INLINE To bits_as(const From& x) {
  return __builtin_bit_cast(To, x);
}

/// Bits of some lanes: all of them or none.
template <class T>
using lane_mask = typename lanes_of<typename float_bits<T>::integer, width<T>>::type;
template <class T>
ATTN_INLINE packet<T> keep(const packet<T>& x, const lane_mask<T>& lanes) {
  return bits_as<packet<T>>(bits_as<lane_mask<T>>(x) & lanes);
}
/// The last `count` numbers of a packet, each of the size of an Integer.
template <class T, class Integer = typename float_bits<T>::integer>
ATTN_INLINE lane_mask<T> last_numbers(idx_t count) {
  constexpr idx_t all = sizeof(packet<T>) / sizeof(Integer);
  Integer numbers[array_size<all>];
  for (idx_t n = 0; n < all; ++n) numbers[n] = n < all - count ? Integer(0) : Integer(-1);
  return bits_as<lane_mask<T>>(numbers);
}

/// packets(c, to + c) writes `Some` numbers from column c on, in whole packets, until all `cols` are written: the last
/// ones end with the last column, and some of them are written twice. number(c) is one number, where there are fewer.
template <int Some, class N, class Packets, class Number>
ATTN_INLINE void in_packets(idx_t cols, N* __restrict__ to, Packets&& packets, Number&& number) {
  if (cols < Some) {
    for (idx_t c = 0; c < cols; ++c) to[c] = static_cast<N>(number(c));
    return;
  }
  for (idx_t next = 0; next < cols; next += Some) {
    const idx_t c = std::min<idx_t>(next, cols - Some);
    if constexpr (std::same_as<N, float>) {
      packets(c, to + c);
    } else {
      float some[array_size<Some>];
      packets(c, some);
      for (int n = 0; n < Some; ++n) to[c + n] = static_cast<N>(some[n]);
    }
  }
}

/// Bits of halves as numbers: by the processor's instruction, or integer operations on whole vectors.
template <class T>
ATTN_INLINE packet<T> half_bits_as(const typename lanes_of<std::uint16_t, width<T>>::type& raw) {
#if defined(__AVX512F__) && defined(EIGEN_VECTORIZE_AVX512)
  if constexpr (width<T> == 16) return _mm512_cvtph_ps((__m256i)raw);
#endif
#if defined(__F16C__) && defined(EIGEN_VECTORIZE_AVX)
  if constexpr (width<T> == 8) return _mm256_cvtph_ps((__m128i)raw);
#elif defined(__aarch64__) && defined(EIGEN_VECTORIZE_NEON)
  if constexpr (width<T> == 4) return vcvt_f32_f16((float16x4_t)raw);
#endif
  // Exponent and mantissa move up 13 places; 2^112 corrects the difference of the biases, also for subnormals. The
  // largest exponent stands for infinity and NaN in both types.
  using wide = typename lanes_of<std::uint32_t, width<T>>::type;
  const wide bits = __builtin_convertvector(raw, wide), size = (bits & 0x7fff) << 13;
  const wide scaled = (wide)mul<packet<T>>((packet<T>)size, broadcast<T>(0x1p112f));
  const wide special = (wide)(size >= 0x0f800000u) & 0x7f800000u;
  return (packet<T>)(scaled | special | (bits & 0x8000) << 16);
}

/// width<T> elements from p on, as T. Numbers of 16 bits and fewer are widened on whole vectors: Eigen 3.4 does it one
/// by one in most builds. Those of 8 bits, which are finite, become halves first.
template <class T, class S>
ATTN_INLINE packet<T> load_as(const S* p) {
  if constexpr (std::same_as<T, S>) {
    return load<T>(p);
  } else if constexpr (width<T> == 1) {
    return static_cast<T>(*p);
  } else {
    static_assert(std::same_as<T, float> && sizeof(S) <= 2);
    using narrow = typename lanes_of<std::uint16_t, width<T>>::type;
    if constexpr (sizeof(S) == 1) {
      typename lanes_of<std::int8_t, width<T>>::type raw;
      std::memcpy(&raw, p, sizeof raw);
      const narrow bits = (narrow)__builtin_convertvector(raw, typename lanes_of<std::int16_t, width<T>>::type);
      if constexpr (std::same_as<S, float8_e5m2>)
        return half_bits_as<T>(bits << 8);
      else  // one bit of exponent less, of which the sign is a copy: 2^8 corrects the difference of the biases
        return mul(half_bits_as<T>(bits << 7 & 0xbfff), broadcast<T>(0x1p8f));
    } else {
      narrow raw;
      std::memcpy(&raw, p, sizeof raw);
      if constexpr (std::same_as<S, Eigen::half>)
        return half_bits_as<T>(raw);
      else
        return (packet<T>)(__builtin_convertvector(raw, typename lanes_of<std::uint32_t, width<T>>::type) << 16);
    }
  }
}

/// Shifts the bits of every lane up past the mantissa: turns the integer in a lane's lowest bits into an exponent.
/// Eigen 3.4 has no 64-bit integer packets on x86, so the compiler's own vectors do it.
template <class T>
ATTN_INLINE packet<T> bits_to_exponent(const packet<T>& x) {
  using integer = typename float_bits<T>::integer;
  if constexpr (width<T> == 1) {
    return std::bit_cast<T>(static_cast<integer>(static_cast<std::make_unsigned_t<integer>>(std::bit_cast<integer>(x))
                                                 << float_bits<T>::mantissa));
  } else {
    return (packet<T>)((typename lanes_of<integer, width<T>>::type)x << float_bits<T>::mantissa);
  }
}

/// f(0), ..., f(N - 1): a loop that is always unrolled, so that arrays indexed by it can be kept in registers. All of f
/// is inlined.
template <int N, class F>
[[gnu::flatten]] ATTN_INLINE void unroll(F&& f) {
  [&]<int... At>(std::integer_sequence<int, At...>) __attribute__((always_inline)) {
    (f(At), ...);
  }(std::make_integer_sequence<int, N>{});
}
/// The same with std::integral_constant<int, n>, where the program needs constants: f is compiled for each.
template <int N, class F>
ATTN_INLINE void unroll_constants(F&& f) {
  [&]<int... At>(std::integer_sequence<int, At...>) __attribute__((always_inline)) {
    (f(std::integral_constant<int, At>{}), ...);
  }(std::make_integer_sequence<int, N>{});
}

/// x, in a register: GCC repeats a load in every instruction that uses it, and loads are then what takes the time.
template <class P>
ATTN_INLINE P loaded_once(P x) {
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__)
  __asm__("" : "+v"(x));
#endif
  return x;
}
/// p, to what is needed rarely: GCC would hold it in registers, which it takes from sums.
template <class P>
ATTN_INLINE const P* left_in_memory(const P* p) {
#if defined(__GNUC__) && !defined(__clang__)
  __asm__("" : "+r"(p));
#endif
  return p;
}

/// Lane i of the result is lane lane_of(i) of a, or lane lane_of(i) - width<T> of b. Eigen has no such permutation.
template <class T, class F>
ATTN_INLINE packet<T> shuffle(const packet<T>& a, const packet<T>& b, F lane_of) {
  if constexpr (width<T> == 1) {
    return lane_of(0) == 0 ? a : b;
  } else {
    using lanes = typename lanes_of<T, width<T>>::type;
    return [&]<int... At>(std::integer_sequence<int, At...>) __attribute__((always_inline)) {
      constexpr F lane{};
      return (packet<T>)__builtin_shufflevector((lanes)a, (lanes)b, lane(At)...);
    }(std::make_integer_sequence<int, width<T>>{});
  }
}

/// Transposes width x width elements in registers: for every power of two the off-diagonal blocks of that size are
/// swapped. A third of the instructions of Eigen 3.4's ptranspose with 16 lanes.
template <class T, int Block = width<T> / 2>
ATTN_INLINE void transpose(packet<T> (&rows)[width<T>]) {
  if constexpr (Block > 0) {
    constexpr int w = width<T>;
    constexpr auto upper = [](int i) { return i & Block ? w + i - Block : i; };
    constexpr auto lower = [](int i) { return i & Block ? w + i : i + Block; };
    unroll<w / 2>([&](int n) {
      const int i = n / Block * 2 * Block + n % Block;
      const packet<T> a = rows[i], b = rows[i + Block];
      rows[i] = shuffle<T>(a, b, upper);
      rows[i + Block] = shuffle<T>(a, b, lower);
    });
    transpose<T, Block / 2>(rows);
  }
}

/// Sums of adjacent groups of Group lanes. Those of a, then those of b, within every part of Part lanes.
template <class T, int Group, int Part>
ATTN_INLINE packet<T> add_groups(const packet<T>& a, const packet<T>& b) {
  constexpr auto first = [](int i) {
    const int n = 2 * (i % Part - i % Group) + i % Group;
    return i - i % Part + (n < Part ? n : width<T> + n - Part);
  };
  constexpr auto second = [](int i) {
    const int n = 2 * (i % Part - i % Group) + i % Group + Group;
    return i - i % Part + (n < Part ? n : width<T> + n - Part);
  };
  return add(shuffle<T>(a, b, first), shuffle<T>(a, b, second));
}

/// Lane i of the result is the sum of the lanes of x[i]; x is overwritten. All sums are taken in the same order, that
/// of adjacent lanes: within 16 bytes first, which is what processors shuffle by one instruction without an index.
template <class T>
ATTN_INLINE packet<T> sums_across(packet<T> (&x)[width<T>]) {
  constexpr int w = width<T>, part = (std::min)(w, static_cast<int>(16 / sizeof(T)));
  static_assert(w <= 16 && part <= 4);
  if constexpr (part > 1) unroll<w / 2>([&](auto n) { x[n] = add_groups<T, 1, part>(x[2 * n], x[2 * n + 1]); });
  if constexpr (part > 2) unroll<w / 4>([&](auto n) { x[n] = add_groups<T, 1, part>(x[2 * n], x[2 * n + 1]); });
  if constexpr (w > part)
    unroll<w / part / 2>([&](auto n) { x[n] = add_groups<T, part, w>(x[2 * n], x[2 * n + 1]); });
  if constexpr (w > 2 * part) x[0] = add_groups<T, part, w>(x[0], x[1]);
  return x[0];
}

}}}  // namespace attn::ATTN_ISA::detail

#pragma GCC diagnostic pop
