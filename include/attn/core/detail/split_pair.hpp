// attn: products of floats as three products of bf16 numbers, where the matrix unit makes that faster.
//
//   a = a1 + a2 + e,  a1 = bf16(a),  a2 = bf16(a - a1),  |e| <= 2^-16 |a|
//   a b = a1 b1 + a1 b2 + a2 b1,  with an error of up to about 2^-16 |a b|, usually a quarter of that
//
// A pair of floats becomes three operands, (a1, a1, a2) on the left and (b1, b2, b1) on the right: each is a bf16_pair,
// and the sums over the longer depth are the ones above. A number that is not finite, or whose bf16 is not (above
// 3.38e38), makes every sum that it is part of NaN.
#pragma once

#include <attn/core/detail/amx.hpp>
#include <attn/core/detail/bf16_pair.hpp>

#include <array>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// One of the three operands that represent two floats.
struct split_pair {
  std::uint32_t bits;
};

template <>
struct packet_of<split_pair> {
  using type = packet<float>;
};
template <>
struct operand<split_pair> {
  using sum_type = float;
  static constexpr int numbers = 2, operands = 3;
};
template <class P>
inline constexpr bool is_split = std::same_as<P, split_pair>;

/// The bf16 numbers of a packet, and the remainder.
struct split_parts {
  half_lanes high, low;
  packet<float> rest;  // not finite where a number or its bf16 is not

  explicit split_parts(const packet<float>& x) : high(to_bf16(x)) {
    rest = sub(x, bits_as<packet<float>>(__builtin_convertvector(high, word_lanes) << 16));
    low = to_bf16(rest);
  }
};

/// Both parts of 2 width numbers, as pairs of neighbours.
struct split_neighbours {
  packet<bf16_pair> high, low;

  split_neighbours(const packet<float>& first, const packet<float>& second) {
    const split_parts a(first), b(second);
    const half_lanes highs[] = {a.high, b.high}, lows[] = {a.low, b.low};
    std::memcpy(&high, highs, sizeof high), std::memcpy(&low, lows, sizeof low);
  }

#if ATTN_HAS_AMX
  /// The 3 width operands they become on the left of a product.
  void store_left(split_pair* to) const {
    static_assert(width<float> == 16);
    static constexpr auto order = [] {
      std::array<std::uint32_t, 48> from{};
      for (std::uint32_t n = 0; n < 48; ++n) from[n] = n / 3 + (n % 3 == 2 ? 16 : 0);
      return from;
    }();
    for (int n = 0; n < 48; n += 16) {
      const __m512i from = _mm512_loadu_si512(order.data() + n),
                    some = _mm512_permutex2var_epi32(bits_as<__m512i>(high), from, bits_as<__m512i>(low));
      store<split_pair>(to + n, bits_as<packet<split_pair>>(some));
    }
  }
#endif
};

#if ATTN_HAS_AMX
/// `count` numbers, rounded up to whole packets, as the left side of products; a packet of zeros may follow.
inline void split_lanes(const float* x, idx_t count, split_pair* to) {
  for (idx_t n = 0; n < count; n += 2 * width<float>, to += 3 * width<float>)
    split_neighbours(load<float>(x + n), n + width<float> < count ? load<float>(x + n + width<float>) : zero<float>())
        .store_left(to);
}
#endif

}}}  // namespace attn::ATTN_ISA::detail
