// attn: the state of kernel attention, token by token in constant memory.
//
//   auto branch = state;                  // a copy: another continuation of the same sequence
//   state.merge(later);                   // a sequence in two parts, as if fed in one
//   state.write(file); state.read(file);
//   state.rollback(2);                    // the last two tokens were never fed, if the extents say .keep = 2 or more
//
// It has, for every batch item and head, S = sum_j phi(k_j) v_j^T [features, value dim], z = sum_j phi(k_j) [features],
// for exponential features a log scale (a power of two) for each of them, and the product of all gates,
// not a number where those were per channel.
//
// Memory   about (value dim + 2) features numbers per head, value dim rounded up to two vectors, and that again for
//          every token kept; bytes() is exact.
// Rounding Sums are plain, not compensated: that would double what a step reads and writes. A sum of n terms of one
//          sign loses up to n / 2 units in the last place when fed token by token, about sqrt(n) where terms vary; fed
//          in chunks of c <= 1024 tokens, n / c + 80 instead of n.
//
// Of the stream (state_stream.hpp), the numbers of a batch item and head: the product of gates, z [features],
// S [features][value dim], and, where features have log scales, those [features].
#pragma once

#include <attn/core/state_extents.hpp>
#include <attn/kernel/detail/kernel_sums.hpp>
#include <attn/kernel/detail/state_stream.hpp>
#include <attn/kernel/detail/step_ring.hpp>

#include <vector>

namespace attn::inline ATTN_ISA {
namespace detail {

/// What makes states of one type of features and another type different.
struct state_kind {
  std::uint32_t kind = 0, variant = 0;
  bool log_scaled = false;
  bool operator==(const state_kind&) const = default;
};

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
    ring_.forget();
    std::fill_n(gates(), pairs(), T(1));
    for (index n = 0; n < pairs(); ++n) sums(n).clear();
  }

  /// Takes in what followed: `later` was fed the tokens after those fed to *this. Without gates the order does not
  /// matter. Throws std::invalid_argument for a state of another kind or shape, or a later one that was fed with decays per
  /// channel: of decays it has one product per head.
  void merge(const kernel_state& later) {
    const detail::validator check(name_);
    if (later.kind_ != kind_) check.fail("a state of the same kind and feature kernel", "another");
    check.extents({{"batch of the other state =", batch(), later.batch()},
                   {"heads of the other state =", heads(), later.heads()},
                   {"features of the other state =", features(), later.features()},
                   {"value dim of the other state =", value_dim(), later.value_dim()}});
    for (index n = 0; n < pairs(); ++n)
      if (std::isnan(const_cast<kernel_state&>(later).gates()[n]))
        check.fail("a later state whose decays were per token", "one with decays per channel");
    std::vector<T> factors(static_cast<std::size_t>(2 * detail::kernel_sums<T>::lanes(features())));
    for (index n = 0; n < pairs(); ++n) {
      auto mine = sums(n);
      const T gate = const_cast<kernel_state&>(later).gates()[n];
      detail::combine(mine, gate, later.sums(n), mine, factors.data());
      gates()[n] *= gate;
    }
    ring_.forget();
    tokens_ += later.tokens_;
  }

  /// How many of the last tokens can be undone: at most `keep` of the extents, none of those before a reset, merge or
  /// read.
  index kept() const { return ring_.kept(); }
  /// Undoes the last m tokens, to the last bit. Throws std::invalid_argument for more than kept().
  void rollback(index m) {
    ring_.rollback(name_, m);
    tokens_ -= m;
  }

  /// Throws std::runtime_error if the stream does not take it.
  void write(std::ostream& stream) const {
    this->stream().write(stream, tokens_, [&](auto&& visit) { each_number(visit); });
  }

  /// Becomes what was written from a state of the same kind and shape. Throws std::runtime_error for what is no such
  /// stream, another version, or damaged, std::invalid_argument for a state of another kind or shape; *this is then as
  /// it was.
  void read(std::istream& stream) {
    const index each = 1 + features() * (1 + value_dim() + (kind_.log_scaled ? 1 : 0));
    tokens_ = this->stream().read(stream, pairs() * each, [&](auto&& visit) { each_number(visit); });
    ring_.forget();
  }

  // For the step ------------------------------------------------------------------------------------------------------

  const detail::state_kind& kind() const { return kind_; }
  detail::state_memory<T> step_memory() { return {memory_.data() + ring_.place() * each_, gates(), tokens_ == 0}; }
  /// How many of n tokens cannot be undone; the others are fed one by one, each after keep_before().
  index beyond_kept(index n) const { return ring_.beyond(n); }
  void keep_before() {
    const T *const sums = step_memory().sums, *const decays = gates();
    ring_.advance();
    if (gates() == decays) return;
    std::copy_n(sums, each_, step_memory().sums);
    std::copy_n(decays, pairs(), gates());
  }
  void forget_kept() { ring_.forget(); }
  void advance(index tokens) { tokens_ += tokens; }
  detail::memory_layout memory() const {
    return tensor_view<const T>(memory_.data(), {1, 1, 1, static_cast<index>(memory_.size())});
  }

 protected:
  /// Each feature of the extents becomes `per_feature` of the sums'.
  kernel_state(const char* name, detail::state_kind kind, const kernel_state_extents& e, index per_feature = 1)
      : name_(name), kind_(kind), extents_(e), ring_(name, e.keep) {
    const detail::validator check(name);
    check.at_least("batch", 0, e.batch);
    check.at_least("heads", 0, e.heads);
    check.at_least("features", 0, e.features);
    check.at_least("value dim", 0, e.value_dim);
    extents_.features = check.fits("features", {e.features, per_feature});
    // More than the numbers of one, whose paddings at most double the larger of an extent and 64.
    const index most =
        check.fits("sums of a head", {std::max<index>(features(), 64), std::max<index>(e.value_dim, 64), 8});
    check.fits("sums", {ring_.places(), e.batch, e.heads, most});
    each_ = pairs() * detail::kernel_sums<T>::count(features(), e.value_dim, kind.log_scaled);
    memory_.resize(static_cast<std::size_t>(ring_.places() * each_));
    gates_.resize(static_cast<std::size_t>(ring_.places() * pairs()));
    reset();
  }

 private:
  index pairs() const { return batch() * heads(); }
  T* gates() { return gates_.data() + ring_.place() * pairs(); }
  detail::state_stream<T> stream() const {
    return {name_, kind_.kind, kind_.variant, batch(), heads(), features(), value_dim()};
  }
  detail::kernel_sums<T> sums(index pair) const {
    return const_cast<kernel_state*>(this)->step_memory().sums_of(pair, features(), value_dim(), kind_.log_scaled);
  }

  /// Every number of the stream between its header and its checksum.
  template <class Visit>
  void each_number(Visit&& visit) const {
    T* gate = const_cast<kernel_state*>(this)->gates();
    for (index n = 0; n < pairs(); ++n) {
      const auto s = sums(n);
      visit(*gate++);
      for (index r = 0; r < features(); ++r) visit(s.weights[r]);
      for (index r = 0; r < features(); ++r)
        for (index d = 0; d < value_dim(); ++d) visit(s.value(r, d));
      for (index r = 0; s.log_scale && r < features(); ++r) visit(s.log_scale[r]);
    }
  }

  const char* name_;
  detail::state_kind kind_;
  kernel_state_extents extents_;
  detail::step_ring ring_;
  index tokens_ = 0, each_ = 0;  // numbers of all heads at one place of the ring
  std::vector<T, Eigen::aligned_allocator<T>> memory_;
  std::vector<T> gates_;
};

}  // namespace attn::inline ATTN_ISA
