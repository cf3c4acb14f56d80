// attn: states of kernel attention as bytes, version 2; numbers little endian, whatever the machine's order:
//
//   8 bytes "attnsums"; as 32-bit: version 2, kind (1 linear, 2 performer, 3 rfa, 4 delta_rule, 5 dplr), variant (the
//   performer's kernel), bytes of a number (4 or 8); as 64-bit: batch, heads, features, value dim, the tokens of every
//   batch item; for every batch item and head its numbers, IEEE 754; at the end 64 bits, FNV-1a of all bytes before.
#pragma once

#include <attn/core/detail/check.hpp>

#include <bit>
#include <istream>
#include <ostream>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <class N>
using bits_of = std::conditional_t<sizeof(N) == 8, std::uint64_t, std::uint32_t>;

template <class N>
void put_number(std::string& bytes, N number) {
  const std::uint64_t value = std::bit_cast<bits_of<N>>(number);
  for (std::size_t n = 0; n < sizeof(N); ++n) bytes.push_back(static_cast<char>(value >> 8 * n & 255));
}

/// Reads from `at` on, which moves; the bytes are known to be long enough.
template <class N>
N get_number(const std::string& bytes, std::size_t& at) {
  bits_of<N> value = 0;
  for (std::size_t n = 0; n < sizeof(N); ++n)
    value |= static_cast<bits_of<N>>(static_cast<unsigned char>(bytes[at++])) << (8 * n);
  return std::bit_cast<N>(value);
}

inline std::uint64_t fnv_1a(const std::string& bytes) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (char c : bytes) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

/// The stream of one state whose numbers are of type T, and its header.
template <class T>
struct state_stream {
  static constexpr std::uint32_t version = 2;  // 1 had one number of tokens for all batch items

  const char* name;  // of the state, for messages
  std::uint32_t kind = 0, variant = 0;
  idx_t batch = 0, heads = 0, features = 0, value_dim = 0;

  /// each_number(visit) visits the state's numbers in order. Throws std::runtime_error if writing fails.
  template <class EachNumber>
  void write(std::ostream& stream, std::span<const idx_t> tokens, EachNumber&& each_number) const {
    std::string bytes = "attnsums";
    for (std::uint32_t n : {version, kind, variant, static_cast<std::uint32_t>(sizeof(T))})
      put_number(bytes, n);
    for (idx_t n : {batch, heads, features, value_dim}) put_number(bytes, n);
    for (idx_t n : tokens) put_number(bytes, n);
    each_number([&](const T& x) { put_number(bytes, x); });
    put_number(bytes, fnv_1a(bytes));
    if (!stream.write(bytes.data(), static_cast<std::streamsize>(bytes.size())))
      fail("a stream that can be written", "one that failed");
  }

  /// Sets the tokens of every batch item; each_number visits `count` numbers. Throws std::runtime_error for a stream of
  /// another format or version, or a damaged one, and std::invalid_argument for a state of another kind or shape,
  /// before any number changes.
  template <class EachNumber>
  void read(std::istream& stream, std::span<idx_t> tokens, idx_t count, EachNumber&& each_number) const {
    constexpr std::size_t letters = 8, fixed = letters + 4 * 4 + 4 * 8;
    std::string bytes = taken(stream, fixed);
    if (bytes.compare(0, letters, "attnsums") != 0) fail("a stream that begins with attnsums", "another");
    if (bytes.size() < fixed) fail(error_text{"a header of ", fixed, " bytes"}, bytes.size());
    std::size_t at = letters;
    const auto word = [&] { return static_cast<idx_t>(get_number<std::uint32_t>(bytes, at)); };
    const auto extent = [&] { return get_number<idx_t>(bytes, at); };
    const idx_t its_version = word();
    if (its_version == idx_t{version} << 24) fail("numbers in little endian order", "big endian");
    if (its_version != version) fail(error_text{"stream version ", version}, its_version);
    const validator check{name};
    const idx_t its_kind = word(), its_variant = word(), size = word();
    if (its_kind != idx_t(kind)) check.fail("a stream of the same kind of state", "another kind");
    if (its_variant != idx_t(variant)) check.fail("a stream of the same feature kernel", "another");
    check.equal("bytes of a number =", sizeof(T), size);
    check.equal("batch of the stream = batch", batch, extent());
    check.equal("heads of the stream = heads", heads, extent());
    check.equal("features of the stream = features", features, extent());
    check.equal("value dim of the stream = value dim", value_dim, extent());

    const std::size_t body = tokens.size() * 8 + static_cast<std::size_t>(count) * sizeof(T);
    bytes += taken(stream, body + 8);
    if (bytes.size() < fixed + body + 8) fail(error_text{fixed + body + 8, " bytes"}, bytes.size());
    const auto sum = get_number<std::uint64_t>(bytes, at += body);
    bytes.resize(fixed + body);
    const auto each_length = [&](auto&& visit) {
      at = fixed;
      for (idx_t& n : tokens) visit(n, extent());
    };
    bool damaged = sum != fnv_1a(bytes);
    each_length([&](idx_t, idx_t n) { damaged |= n < 0; });
    if (damaged) fail("the checksum of an undamaged stream", "another");
    each_length([](idx_t& to, idx_t n) { to = n; });
    each_number([&](T& x) { x = get_number<T>(bytes, at); });
  }

 private:
  [[noreturn]] void fail(word expected, word found) const {
    raise<std::runtime_error>(error_text{"attn::", name, ": expected ", expected, "; found ", found}.c_str());
  }

  /// Up to `count` bytes; a stream that ends earlier gives fewer.
  static std::string taken(std::istream& stream, std::size_t count) {
    std::string bytes(count, '\0');
    stream.read(bytes.data(), static_cast<std::streamsize>(count));
    bytes.resize(static_cast<std::size_t>(stream.gcount()));
    return bytes;
  }
};

}}}  // namespace attn::ATTN_ISA::detail
