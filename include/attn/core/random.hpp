// attn: random numbers that are the same on every machine.
//
//   attn::random_numbers numbers(seed);
//   numbers.normal();      // unit normal, double
//   numbers.below(n);      // 0 ... n - 1, uniformly
//
// The numbers of std::normal_distribution differ between standard libraries, and those of any formula with a * b + c
// between compilers that fuse it and those that do not. Here a seed gives the same bits everywhere: apart from integer
// arithmetic only single products, quotients and square roots are used, whose rounding IEEE 754 defines.
#pragma once

#include <attn/core/tensor_view.hpp>

#include <bit>
#include <cmath>
#include <cstdint>

namespace attn { inline namespace ATTN_ISA {

/// SplitMix64 (Steele, Lea & Flood 2014): a hashed counter. Generators of one seed and different streams are
/// independent.
class random_numbers {
 public:
  constexpr explicit random_numbers(std::uint64_t seed, std::uint64_t stream = 0)
      : state_(mixed(seed + step) ^ mixed(~stream)) {}

  constexpr std::uint64_t bits() { return mixed(state_ += step); }

  /// A whole number from 0 to n - 1 (n >= 1), without bias (Lemire 2019).
  idx_t below(idx_t n) {
    const auto range = static_cast<std::uint64_t>(n), least = (0 - range) % range;
    for (;;) {
      const wide product = static_cast<wide>(bits()) * range;
      if (static_cast<std::uint64_t>(product) >= least) return static_cast<idx_t>(product >> 64);
    }
  }

  /// A unit normal number by Marsaglia's polar method: two at a time from a point in the unit circle.
  double normal() {
    if (has_spare_) {
      has_spare_ = false;
      return spare_;
    }
    for (;;) {
      const std::uint64_t point = bits();
      const std::int64_t x = static_cast<std::int32_t>(point >> 32), y = static_cast<std::int32_t>(point);
      // the squared radius in units of 2^-62; 2^63 at the corner -1, -1
      const auto square = static_cast<std::uint64_t>(x * x) + static_cast<std::uint64_t>(y * y);
      if (square == 0 || square >> 62) continue;
      const double octaves = static_cast<double>((std::uint64_t(62) << 56) - log2_of(square)) * 0x1p-56;
      // -2 ln(r^2) / r^2; the coordinates are in units of 2^-31, the square in units of 2^-62
      const double factor = std::sqrt(octaves * two_ln_2 / static_cast<double>(square));
      has_spare_ = true;
      spare_ = static_cast<double>(y) * factor;
      return static_cast<double>(x) * factor;
    }
  }

 private:
  __extension__ typedef unsigned __int128 wide;
  static constexpr std::uint64_t step = 0x9e3779b97f4a7c15;
  static constexpr double two_ln_2 = 1.386294361119890618834464242916353136;

  static constexpr std::uint64_t mixed(std::uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }

  /// log2(n) with 56 binary places, for n >= 1: every squaring of the mantissa gives the next binary place.
  static std::uint64_t log2_of(std::uint64_t n) {
    const int whole = 63 - std::countl_zero(n);
    std::uint64_t result = static_cast<std::uint64_t>(whole), mantissa = n << (63 - whole);  // 1.63
    for (int place = 0; place < 56; ++place) {
      const wide square = static_cast<wide>(mantissa) * mantissa;
      const bool carry = square >> 127;
      mantissa = static_cast<std::uint64_t>(carry ? square >> 64 : square >> 63);
      result = 2 * result + carry;
    }
    return result;
  }

  std::uint64_t state_;
  double spare_ = 0;
  bool has_spare_ = false;
};

}}  // namespace attn::ATTN_ISA
