// attn: the state of kernel attention, token by token in constant memory.
//
//   attn::linear_state<float> state({.heads = 8, .features = 64, .value_dim = 64});
//   attn::linear_step(state, q_t, k_t, v_t, out_t);            // any number of tokens; performer_step, rfa_step alike
//   state.append(k, v);                                        // the same without queries; performer, rfa: features,
//   too state.merge(later);                                        // a sequence in two parts, as if fed in one
//   state.write(file); state.read(file);
//
// It has, for every batch item and head, S = sum_j phi(k_j) v_j^T [features, value dim], z = sum_j phi(k_j) [features],
// for exponential features a log scale (a power of two) for each of them, and the product of all gates.
//
// Memory   about (value dim + 2) features numbers per head, value dim rounded up to two vectors; bytes() is exact.
// Rounding Sums are plain, not compensated: that would double what a step reads and writes. A sum of n terms of one
//          sign loses up to n / 2 units in the last place when fed token by token, about sqrt(n) where terms vary; fed
//          in chunks of c <= 1024 tokens, n / c + 80 instead of n.
//
// The stream, version 1; numbers little endian, whatever the machine's order:
//   8 bytes "attnsums"; as 32-bit: version 1, kind (1 linear, 2 performer, 3 rfa), variant (the performer's kernel),
//   bytes of a number (4 or 8); as 64-bit: batch, heads, features, value dim, tokens; for every batch item and head, as
//   IEEE 754 numbers: the product of gates, z [features], S [features][value dim], and, where features have log scales,
//   those [features]; at last 64 bits, FNV-1a of every byte before.
#pragma once

#include <attn/core/state_extents.hpp>
#include <attn/kernel/detail/kernel_sums.hpp>

#include <bit>
#include <cstring>
#include <istream>
#include <ostream>
#include <vector>

namespace attn::inline ATTN_ISA {
namespace detail {

/// What makes states of one type of features and another type different.
struct state_kind {
  std::uint32_t kind = 0, variant = 0;
  bool log_scaled = false;
  bool operator==(const state_kind&) const = default;
};

class byte_writer {
 public:
  template <class N>
  void put(N number) {
    using bits = std::conditional_t<sizeof(N) == 8, std::uint64_t, std::uint32_t>;
    bits value = std::bit_cast<bits>(number);
    for (std::size_t n = 0; n < sizeof value; ++n, value >>= 4, value >>= 4)
      bytes_.push_back(static_cast<char>(value & 255));
  }
  void text(const char* letters) { bytes_.append(letters); }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

inline std::uint64_t fnv_1a(const std::string& bytes) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (char c : bytes) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

/// Reads from a string that is known to be long enough.
class byte_reader {
 public:
  explicit byte_reader(const std::string& bytes, std::size_t at = 0) : bytes_(bytes), at_(at) {}
  template <class N>
  N read() {
    using bits = std::conditional_t<sizeof(N) == 8, std::uint64_t, std::uint32_t>;
    bits value = 0;
    for (std::size_t n = 0; n < sizeof value; ++n)
      value |= static_cast<bits>(static_cast<unsigned char>(bytes_[at_++])) << (8 * n);
    return std::bit_cast<N>(value);
  }

 private:
  const std::string& bytes_;
  std::size_t at_;
};

}  // namespace detail

/// The sums of one kind of kernel attention; T is float (also for 16-bit elements) or double: the base of linear_state,
/// performer_state and rfa_state. One that was moved from may only be assigned to or destroyed.
template <class T>
class kernel_state {
  static_assert(std::same_as<T, float> || std::same_as<T, double>);

 public:
  index batch() const { return batch_; }
  index heads() const { return heads_; }
  index features() const { return features_; }
  index value_dim() const { return dim_v_; }
  /// Fed so far.
  index tokens() const { return tokens_; }
  std::size_t bytes() const { return (memory_.size() + gates_.size()) * sizeof(T); }

  /// Element (r, d) of S, and r of z, of one head; with log scales, times 2^log_scale(r).
  T sum(index b, index h, index r, index d) const {
    const auto s = sums(b, h);
    return s.panel(d / s.wide * s.wide)[r * s.wide + d % s.wide];
  }
  T weight(index b, index h, index r) const { return sums(b, h).weights[r]; }
  T log_scale(index b, index h, index r) const {
    const auto s = sums(b, h);
    return s.log_scale && s.log_scale[r] > detail::no_log_scale<T> ? s.log_scale[r] : T(0);
  }

  /// Back to the start of a sequence.
  void reset() {
    tokens_ = 0;
    std::fill(gates_.begin(), gates_.end(), T(1));
    for (index n = 0; n < batch_ * heads_; ++n) sums(n).clear();
  }

  /// Takes in what followed: `later` was fed the tokens after those fed to *this. Without gates the order does not
  /// matter. Throws std::invalid_argument for a state of another kind or shape.
  void merge(const kernel_state& later) {
    check_same(later);
    std::vector<T> factors(static_cast<std::size_t>(2 * lanes()));
    for (index n = 0; n < batch_ * heads_; ++n) {
      auto mine = sums(n);
      const T gate = later.gates_[static_cast<std::size_t>(n)];
      detail::combine(mine, gate, later.sums(n), mine, factors.data());
      gates_[static_cast<std::size_t>(n)] *= gate;
    }
    tokens_ += later.tokens_;
  }

  /// Throws std::runtime_error if the stream does not read it.
  void write(std::ostream& stream) const {
    detail::byte_writer to = header();
    for (index n = 0; n < batch_ * heads_; ++n) {
      to.put(gates_[static_cast<std::size_t>(n)]);
      const auto s = sums(n);
      for (index r = 0; r < features_; ++r) to.put(s.weights[r]);
      for (index r = 0; r < features_; ++r)
        for (index d = 0; d < dim_v_; ++d) to.put(s.panel(d / s.wide * s.wide)[r * s.wide + d % s.wide]);
      for (index r = 0; s.log_scale && r < features_; ++r) to.put(s.log_scale[r]);
    }
    const std::uint64_t sum = detail::fnv_1a(to.bytes());
    to.put(sum);
    if (!stream.write(to.bytes().data(), static_cast<std::streamsize>(to.bytes().size())))
      throw std::runtime_error(name() + ": expected a stream that can be written; found one that failed");
  }

  /// Becomes what was written from a state of the same kind and shape. Throws std::runtime_error for what is no such
  /// stream, another version, or damaged, std::invalid_argument for a state of another kind or shape; *this is then as
  /// it was.
  void read(std::istream& stream) {
    constexpr std::size_t letters = 8, fixed = letters + 4 * 4 + 5 * 8;
    std::string bytes = taken(stream, fixed);
    const auto damaged = [&](const std::string& expected, const std::string& found) {
      throw std::runtime_error(name() + ": expected " + expected + "; found " + found);
    };
    if (bytes.compare(0, letters, "attnsums") != 0) damaged("a stream that begins with attnsums", "another");
    if (bytes.size() < fixed) damaged("a header of " + std::to_string(fixed) + " bytes", std::to_string(bytes.size()));
    detail::byte_reader head(bytes, letters);
    const auto version = head.read<std::uint32_t>();
    if (version != 1) damaged("stream version 1", std::to_string(version));
    const auto kind = head.read<std::uint32_t>(), variant = head.read<std::uint32_t>(),
               size = head.read<std::uint32_t>();
    const detail::validator check(name_);
    if (kind != kind_.kind) check.fail("a stream of the same kind of state", "another kind");
    if (variant != kind_.variant) check.fail("a stream of the same feature kernel", "another");
    check.equal("bytes of a number =", sizeof(T), static_cast<index>(size));
    check.equal("batch of the stream = batch", batch_, static_cast<index>(head.read<std::int64_t>()));
    check.equal("heads of the stream = heads", heads_, static_cast<index>(head.read<std::int64_t>()));
    check.equal("features of the stream = features", features_, static_cast<index>(head.read<std::int64_t>()));
    check.equal("value dim of the stream = value dim", dim_v_, static_cast<index>(head.read<std::int64_t>()));
    const auto tokens = static_cast<index>(head.read<std::int64_t>());

    const auto each = static_cast<std::size_t>(1 + features_ * (1 + dim_v_ + (kind_.log_scaled ? 1 : 0)));
    const std::size_t body = static_cast<std::size_t>(batch_ * heads_) * each * sizeof(T);
    const std::string rest = taken(stream, body + 8);
    if (rest.size() < body + 8)
      damaged(std::to_string(fixed + body + 8) + " bytes", std::to_string(fixed + rest.size()));
    bytes.append(rest, 0, body);
    if (detail::byte_reader(rest, body).read<std::uint64_t>() != detail::fnv_1a(bytes) || tokens < 0)
      damaged("the checksum of an undamaged stream", "another");

    detail::byte_reader from(rest);
    for (index n = 0; n < batch_ * heads_; ++n) {
      gates_[static_cast<std::size_t>(n)] = from.read<T>();
      const auto s = sums(n);
      for (index r = 0; r < features_; ++r) s.weights[r] = from.read<T>();
      for (index r = 0; r < features_; ++r)
        for (index d = 0; d < dim_v_; ++d) s.panel(d / s.wide * s.wide)[r * s.wide + d % s.wide] = from.read<T>();
      for (index r = 0; s.log_scale && r < features_; ++r) s.log_scale[r] = from.read<T>();
    }
    tokens_ = tokens;
  }

  // For the step ------------------------------------------------------------------------------------------------------

  const detail::state_kind& kind() const { return kind_; }
  detail::state_memory<T> step_memory() { return {memory_.data(), gates_.data(), tokens_ == 0}; }
  void advance(index tokens) { tokens_ += tokens; }
  detail::memory_layout memory() const {
    return tensor_view<const T>(memory_.data(), {1, 1, 1, static_cast<index>(memory_.size())});
  }

 protected:
  /// Each feature of the extents becomes `per_feature` of the sums'.
  kernel_state(const char* name, detail::state_kind kind, const kernel_state_extents& e, index per_feature = 1)
      : name_(name), kind_(kind), batch_(e.batch), heads_(e.heads), dim_v_(e.value_dim) {
    const detail::validator check(name);
    check.at_least("batch", 0, e.batch);
    check.at_least("heads", 0, e.heads);
    check.at_least("features", 0, e.features);
    check.at_least("value dim", 0, e.value_dim);
    features_ = check.fits("features", {e.features, per_feature});
    // More than each(), whose paddings at most double the larger of an extent and 64.
    const index most = check.fits("sums of a head", {std::max<index>(features_, 64), std::max<index>(dim_v_, 64), 8});
    check.fits("sums", {batch_, heads_, most});
    memory_.resize(static_cast<std::size_t>(batch_ * heads_ * each()));
    gates_.resize(static_cast<std::size_t>(batch_ * heads_));
    reset();
  }

 private:
  index lanes() const { return detail::kernel_sums<T>::lanes(features_); }
  index each() const { return detail::kernel_sums<T>::count(features_, dim_v_, kind_.log_scaled); }
  detail::kernel_sums<T> sums(index b, index h) const { return sums(b * heads_ + h); }
  detail::kernel_sums<T> sums(index n) const {
    return const_cast<kernel_state*>(this)->step_memory().sums_of(n, features_, dim_v_, kind_.log_scaled);
  }
  std::string name() const { return std::string("attn::") + name_; }

  void check_same(const kernel_state& other) const {
    const detail::validator check(name_);
    if (other.kind_ != kind_) check.fail("a state of the same kind and feature kernel", "another");
    check.equal("batch of the other state =", batch_, other.batch_);
    check.equal("heads of the other state =", heads_, other.heads_);
    check.equal("features of the other state =", features_, other.features_);
    check.equal("value dim of the other state =", dim_v_, other.dim_v_);
  }

  detail::byte_writer header() const {
    detail::byte_writer to;
    to.text("attnsums");
    for (std::uint32_t n : {std::uint32_t(1), kind_.kind, kind_.variant, static_cast<std::uint32_t>(sizeof(T))})
      to.put(n);
    for (index n : {batch_, heads_, features_, dim_v_, tokens_}) to.put(static_cast<std::int64_t>(n));
    return to;
  }

  /// Up to `count` bytes; a stream that ends earlier gives fewer.
  static std::string taken(std::istream& stream, std::size_t count) {
    std::string bytes(count, '\0');
    stream.read(bytes.data(), static_cast<std::streamsize>(count));
    bytes.resize(static_cast<std::size_t>(stream.gcount()));
    return bytes;
  }

  const char* name_;
  detail::state_kind kind_;
  index batch_, heads_, features_ = 0, dim_v_, tokens_ = 0;
  std::vector<T, Eigen::aligned_allocator<T>> memory_;
  std::vector<T> gates_;
};

}  // namespace attn::inline ATTN_ISA
