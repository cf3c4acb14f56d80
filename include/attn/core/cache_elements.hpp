// attn: elements of caches in fewer bits, beside Eigen::half, Eigen::bfloat16 and std::int8_t.
//
//   attn::kv_cache<attn::float8_e4m3> cache({.heads = 8, .dim = 128});     // 8 bits for each number
//   attn::kv_cache<attn::int4> cache({.heads = 8, .dim = 128});            // 5 bits for each number
//   attn::kv_cache<attn::int8_channels> cache({.heads = 8, .dim = 128});   // 9 bits
//
// Where a few channels of the keys are far larger than the others, as in many trained models, a scale for each token
// leaves little to the others. Therefore int4 and int8_channels have a scale and an offset for each channel of 32
// tokens (KIVI, Liu et al. 2024; formula in core/detail/channel_codes.hpp). What caches do with them: kv_cache.hpp.
#pragma once

#include <attn/core/detail/config.hpp>

#include <bit>
#include <cmath>
#include <cstdint>

namespace attn { inline namespace ATTN_ISA {

/// Four bits, and eight bits, of each number: bytes of blocks of 32 tokens, which have other numbers in them.
enum class [[gnu::may_alias]] int4 : std::uint8_t {};
enum class [[gnu::may_alias]] int8_channels : std::uint8_t {};

namespace detail {

/// A number of a sign, Exponent and Fraction bits.
template <int Exponent, int Fraction>
struct float8 {
  static constexpr int bias = (1 << (Exponent - 1)) - 1;
  static constexpr std::uint8_t largest_bits = Exponent == 4 ? 0x7e : 0x7b;
  static constexpr float largest = Exponent == 4 ? 448.0f : 57344.0f;

  std::uint8_t bits = 0;

  float8() = default;
  /// Rounded to nearest, ties to even; numbers beyond the largest become that one, NaN stays NaN.
  explicit float8(float x) {
    const auto given = std::bit_cast<std::uint32_t>(x), size = given & 0x7fffffffu;
    const float number = std::bit_cast<float>(size);
    std::uint32_t code = 0x7f;
    if (number < std::ldexp(1.0f, 1 - bias))  // subnormal; the largest of these may become the least normal one
      code = static_cast<std::uint32_t>(std::nearbyint(std::ldexp(number, bias - 1 + Fraction)));
    else if (size <= 0x7f800000u)
      code = number >= largest ? largest_bits
                               : ((size + (1u << (22 - Fraction)) - 1 + (size >> (23 - Fraction) & 1)) >>
                                  (23 - Fraction)) - (std::uint32_t(127 - bias) << Fraction);
    bits = static_cast<std::uint8_t>(code | given >> 31 << 7);
  }
  explicit operator float() const {
    const std::uint32_t code = bits & 0x7fu;
    float size = std::ldexp(static_cast<float>(code), 1 - bias - Fraction);
    if (code >> Fraction != 0)
      size = std::bit_cast<float>((code << (23 - Fraction)) + (std::uint32_t(127 - bias) << 23));
    if (code > largest_bits) size = std::bit_cast<float>(Exponent == 5 && code == 0x7c ? 0x7f800000u : 0x7fc00000u);
    return bits & 0x80 ? -size : size;
  }
};

}  // namespace detail

/// Numbers of eight bits (Micikevicius et al. 2022): up to 448 with 4 significant bits, and up to 57344 with 3.
using float8_e4m3 = detail::float8<4, 3>;
using float8_e5m2 = detail::float8<5, 2>;

}}  // namespace attn::ATTN_ISA
