// SHA-256 (FIPS 180-4), to tell whether a file is the one that is meant.
//
//   support::sha256 sum;
//   sum.add(bytes);
//   sum.hex()        // 64 digits
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace support {

class sha256 {
 public:
  void add(std::string_view bytes) {
    bits_ += 8 * std::uint64_t{bytes.size()};
    if (!rest_.empty()) {
      const std::size_t count = std::min(64 - rest_.size(), bytes.size());
      rest_ += bytes.substr(0, count);
      bytes.remove_prefix(count);
      if (rest_.size() < 64) return;
      add_block(rest_.data());
      rest_.clear();
    }
    for (; bytes.size() >= 64; bytes.remove_prefix(64)) add_block(bytes.data());
    rest_ = bytes;
  }

  std::string hex() const {
    sha256 end = *this;  // padded by one bit, zeros and the number of bits
    std::string padding(1, '\x80');
    padding.resize(1 + (119 - rest_.size()) % 64, '\0');
    for (int n = 7; n >= 0; --n) padding += static_cast<char>(bits_ >> (8 * n));
    end.add(padding);
    std::string text;
    for (const std::uint32_t word : end.state_)
      for (int n = 28; n >= 0; n -= 4) text += "0123456789abcdef"[(word >> n) & 15];
    return text;
  }

 private:
  using words = std::array<std::uint32_t, 64>;

  /// The first 32 bits of the fractional part of the root of the n-th prime.
  template <std::size_t Count>
  static std::array<std::uint32_t, Count> roots(bool cubic) {
    std::array<std::uint32_t, Count> list{};
    std::size_t n = 0;
    for (int p = 2; n < Count; ++p) {
      bool prime = true;
      for (int d = 2; d * d <= p; ++d) prime = prime && p % d != 0;
      if (!prime) continue;
      const long double root = cubic ? std::cbrt(static_cast<long double>(p)) : std::sqrt(static_cast<long double>(p));
      list[n++] = static_cast<std::uint32_t>((root - std::floor(root)) * 4294967296.0L);
    }
    return list;
  }

  void add_block(const char* bytes) {
    static const words k = roots<64>(true);
    using std::rotr;
    words w;
    for (std::size_t t = 0; t < 16; ++t) {
      std::uint32_t word = 0;
      for (std::size_t n = 0; n < 4; ++n) word = word << 8 | static_cast<unsigned char>(bytes[4 * t + n]);
      w[t] = word;
    }
    for (std::size_t t = 16; t < 64; ++t) {
      const std::uint32_t s0 = rotr(w[t - 15], 7) ^ rotr(w[t - 15], 18) ^ (w[t - 15] >> 3);
      const std::uint32_t s1 = rotr(w[t - 2], 17) ^ rotr(w[t - 2], 19) ^ (w[t - 2] >> 10);
      w[t] = w[t - 16] + s0 + w[t - 7] + s1;
    }
    auto [a, b, c, d, e, f, g, h] = state_;
    for (std::size_t t = 0; t < 64; ++t) {
      const std::uint32_t t1 = h + (rotr(e, 6) ^ rotr(e, 11) ^ rotr(e, 25)) + ((e & f) ^ (~e & g)) + k[t] + w[t];
      const std::uint32_t t2 = (rotr(a, 2) ^ rotr(a, 13) ^ rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
    }
    const std::uint32_t sums[] = {a, b, c, d, e, f, g, h};
    for (std::size_t n = 0; n < 8; ++n) state_[n] += sums[n];
  }

  std::array<std::uint32_t, 8> state_ = roots<8>(false);
  std::uint64_t bits_ = 0;
  std::string rest_;
};

}  // namespace support
