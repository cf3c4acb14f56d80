// attn: the state of kernel attention, token by token in constant memory.
//
//   auto branch = state;                  // a copy: another continuation of the same sequence
//   state.merge(later);                   // a sequence in two parts, as if fed in one
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

}  // namespace detail

/// The sums of one kind of kernel attention; T is float (also for 16-bit elements) or double: the base of linear_state,
/// performer_state and rfa_state. One that was moved from may only be assigned to or destroyed.
template <class T>
class kernel_state {
  static_assert(std::same_as<T, float> || std::same_as<T, double>);

 public:
  index batch() const { return extents_.batch; }
  index heads() const { return extents_.heads; }
  index features() const { return extents_.features; }
  index value_dim() const { return extents_.value_dim; }
  /// Fed so far.
  index tokens() const { return tokens_; }
  std::size_t bytes() const { return (memory_.size() + gates_.size()) * sizeof(T); }

  /// Element (r, d) of S, and r of z, of one head; with log scales, times 2^log_scale(r).
  T sum(index b, index h, index r, index d) const {
    return sums(b * heads() + h).value(r, d);
  }
  T weight(index b, index h, index r) const { return sums(b * heads() + h).weights[r]; }
  T log_scale(index b, index h, index r) const {
    const auto s = sums(b * heads() + h);
    return s.log_scale && s.log_scale[r] > detail::no_log_scale<T> ? s.log_scale[r] : T(0);
  }

  /// Back to the start of a sequence.
  void reset() {
    tokens_ = 0;
    std::fill(gates_.begin(), gates_.end(), T(1));
    for (index n = 0; n < pairs(); ++n) sums(n).clear();
  }

  /// Takes in what followed: `later` was fed the tokens after those fed to *this. Without gates the order does not
  /// matter. Throws std::invalid_argument for a state of another kind or shape.
  void merge(const kernel_state& later) {
    const detail::validator check(name_);
    if (later.kind_ != kind_) check.fail("a state of the same kind and feature kernel", "another");
    check.extents({{"batch of the other state =", batch(), later.batch()},
                   {"heads of the other state =", heads(), later.heads()},
                   {"features of the other state =", features(), later.features()},
                   {"value dim of the other state =", value_dim(), later.value_dim()}});
    std::vector<T> factors(static_cast<std::size_t>(2 * detail::kernel_sums<T>::lanes(features())));
    for (index n = 0; n < pairs(); ++n) {
      auto mine = sums(n);
      const T gate = later.gates_[static_cast<std::size_t>(n)];
      detail::combine(mine, gate, later.sums(n), mine, factors.data());
      gates_[static_cast<std::size_t>(n)] *= gate;
    }
    tokens_ += later.tokens_;
  }

  /// Throws std::runtime_error if the stream does not read it.
  void write(std::ostream& stream) const {
    std::string bytes = "attnsums";
    for (std::uint32_t n : {std::uint32_t(1), kind_.kind, kind_.variant, static_cast<std::uint32_t>(sizeof(T))})
      detail::put_number(bytes, n);
    for (index n : {batch(), heads(), features(), value_dim(), tokens_}) detail::put_number(bytes, n);
    each_number([&](const T& x) { detail::put_number(bytes, x); });
    detail::put_number(bytes, detail::fnv_1a(bytes));
    if (!stream.write(bytes.data(), static_cast<std::streamsize>(bytes.size())))
      stream_error("a stream that can be written", "one that failed");
  }

  /// Becomes what was written from a state of the same kind and shape. Throws std::runtime_error for what is no such
  /// stream, another version, or damaged, std::invalid_argument for a state of another kind or shape; *this is then as
  /// it was.
  void read(std::istream& stream) {
    constexpr std::size_t letters = 8, fixed = letters + 4 * 4 + 5 * 8;
    std::string bytes = taken(stream, fixed);
    if (bytes.compare(0, letters, "attnsums") != 0) stream_error("a stream that begins with attnsums", "another");
    if (bytes.size() < fixed) stream_error(detail::text({"a header of ", fixed, " bytes"}), bytes.size());
    std::size_t at = letters;
    const auto word = [&] { return static_cast<index>(detail::get_number<std::uint32_t>(bytes, at)); };
    const auto extent = [&] { return detail::get_number<index>(bytes, at); };
    if (const index version = word(); version != 1) stream_error("stream version 1", version);
    const detail::validator check(name_);
    const index kind = word(), variant = word(), size = word();
    if (kind != index(kind_.kind)) check.fail("a stream of the same kind of state", "another kind");
    if (variant != index(kind_.variant)) check.fail("a stream of the same feature kernel", "another");
    check.equal("bytes of a number =", sizeof(T), size);
    check.equal("batch of the stream = batch", batch(), extent());
    check.equal("heads of the stream = heads", heads(), extent());
    check.equal("features of the stream = features", features(), extent());
    check.equal("value dim of the stream = value dim", value_dim(), extent());
    const index tokens = extent();

    const auto each = static_cast<std::size_t>(1 + features() * (1 + value_dim() + (kind_.log_scaled ? 1 : 0)));
    const std::size_t body = static_cast<std::size_t>(pairs()) * each * sizeof(T);
    bytes += taken(stream, body + 8);
    if (bytes.size() < fixed + body + 8) stream_error(detail::text({fixed + body + 8, " bytes"}), bytes.size());
    const auto sum = detail::get_number<std::uint64_t>(bytes, at += body);
    bytes.resize(fixed + body);
    if (sum != detail::fnv_1a(bytes) || tokens < 0) stream_error("the checksum of an undamaged stream", "another");
    at = fixed;
    each_number([&](T& x) { x = detail::get_number<T>(bytes, at); });
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
      : name_(name), kind_(kind), extents_(e) {
    const detail::validator check(name);
    check.at_least("batch", 0, e.batch);
    check.at_least("heads", 0, e.heads);
    check.at_least("features", 0, e.features);
    check.at_least("value dim", 0, e.value_dim);
    extents_.features = check.fits("features", {e.features, per_feature});
    // More than the numbers of one, whose paddings at most double the larger of an extent and 64.
    const index most =
        check.fits("sums of a head", {std::max<index>(features(), 64), std::max<index>(e.value_dim, 64), 8});
    check.fits("sums", {e.batch, e.heads, most});
    const index each = detail::kernel_sums<T>::count(features(), e.value_dim, kind.log_scaled);
    memory_.resize(static_cast<std::size_t>(pairs() * each));
    gates_.resize(static_cast<std::size_t>(pairs()));
    reset();
  }

 private:
  index pairs() const { return batch() * heads(); }
  detail::kernel_sums<T> sums(index pair) const {
    return const_cast<kernel_state*>(this)->step_memory().sums_of(pair, features(), value_dim(), kind_.log_scaled);
  }

  /// Every number of the stream between its header and its checksum.
  template <class Visit>
  void each_number(Visit&& visit) const {
    T* gate = const_cast<kernel_state*>(this)->gates_.data();
    for (index n = 0; n < pairs(); ++n) {
      const auto s = sums(n);
      visit(*gate++);
      for (index r = 0; r < features(); ++r) visit(s.weights[r]);
      for (index r = 0; r < features(); ++r)
        for (index d = 0; d < value_dim(); ++d) visit(s.value(r, d));
      for (index r = 0; s.log_scale && r < features(); ++r) visit(s.log_scale[r]);
    }
  }

  [[noreturn]] void stream_error(detail::word expected, detail::word found) const {
    throw std::runtime_error(detail::text({"attn::", name_, ": expected ", expected, "; found ", found}));
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
  kernel_state_extents extents_;
  index tokens_ = 0;
  std::vector<T, Eigen::aligned_allocator<T>> memory_;
  std::vector<T> gates_;
};

}  // namespace attn::inline ATTN_ISA
