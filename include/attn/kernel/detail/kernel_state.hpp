// attn: the states of kernel attention, token by token in constant memory.
//
//   auto branch = state;                  // a copy: another continuation of the same sequences
//   state.merge(later);                   // sequences in two parts, as if fed in one
//   state.write(file); state.read(file);
//   state.rollback(2); // as if the last two tokens had not been fed; needs .keep = 2 or more
//
// Batch items are independent sequences, of any number of tokens each:
//
//   linear_step(state, q, k, v, out, {.lengths = n});   // item b is fed the first n[b] tokens; the rest is padding
//   state.reset(1); state.rollback(0, 2); state.copy_item(0, 1); state.reorder(beams); state.tokens(1)
//
// The state has, for every batch item and head, S = sum_j phi(k_j) v_j^T [features, value dim], z = sum_j phi(k_j)
// [features], for exponential features a log scale (a power of two) for each of them, and the product of all gates,
// which is NaN where gates were per channel.
//
// Memory   about (value dim + 2) features numbers per head, value dim rounded up to two vectors, and as much again for
//          every token kept; bytes() is exact.
// Rounding Sums are not compensated, which would double the memory that a step reads and writes. A sum of n terms of
//          one sign loses up to n / 2 units in the last place when fed token by token, about sqrt(n) where terms vary;
//          fed in chunks of c <= 1024 tokens, n / c + 80 instead of n.
//
// In a stream (state_stream.hpp) the numbers of a batch item and head are the product of gates, z [features], S
// [features][value dim], and, where features have log scales, those [features]. Of delta_rule and dplr there is S alone,
// whose features are the dims of keys.
#pragma once

#include <attn/core/detail/item_state.hpp>
#include <attn/kernel/detail/kernel_sums.hpp>
#include <attn/kernel/detail/state_stream.hpp>

namespace attn { inline namespace ATTN_ISA {
namespace detail {

/// What distinguishes the states of one type of features from those of another.
struct state_kind {
  std::uint32_t kind = 0, variant = 0;
  sum_parts parts = sum_parts::weights;
  bool operator==(const state_kind&) const = default;
};

/// The inside of the states. By the rules that read the state features are dims of keys.
template <class T>
class kernel_items : public item_state<kernel_items<T>, T> {
  static_assert(std::same_as<T, float> || std::same_as<T, double>);
  using base = item_state<kernel_items<T>, T>;

 public:
  /// Each feature of the extents becomes `per_feature` features of the sums.
  kernel_items(const char* name, state_kind kind, const kernel_state_extents& e, idx_t per_feature)
      : base(name, e.batch, e.keep), kind_(kind), extents_(e) {
    const validator check{name};
    const bool reads = kind.parts == sum_parts::values;
    check.at_least("heads", 0, e.heads);
    check.at_least(reads ? "dim" : "features", 0, e.features);
    check.at_least("value dim", 0, e.value_dim);
    extents_.features = check.fits("features", {e.features, per_feature});
    // An upper bound of the numbers of a state: padding at most doubles the larger of an extent and 64.
    const idx_t most = check.fits(reads ? "the state of a head" : "sums of a head",
                                  {std::max<idx_t>(features(), 64), std::max<idx_t>(e.value_dim, 64), reads ? 4 : 8});
    check.fits(reads ? "states" : "sums", {this->places(), e.batch, e.heads, most});
    this->allocate(e.batch, heads() * sums_size() + (reads ? 0 : round_up(heads(), 16)));
  }

  idx_t heads() const { return extents_.heads; }
  idx_t features() const { return extents_.features; }
  idx_t value_dim() const { return extents_.value_dim; }
  const state_kind& kind() const { return kind_; }

  /// At a place of an item as kernel_call::sums_at says.
  idx_t sums_size() const { return kernel_sums<T>::count(features(), value_dim(), kind_.parts); }
  kernel_sums<T> sums(idx_t b, idx_t h) const {
    auto s = kernel_sums<T>::over(this->items().at(b) + h * sums_size(), features(), value_dim(), kind_.parts);
    s.empty = this->items().empty(b);
    return s;
  }
  T& gate(idx_t b, idx_t h) const { return this->items().at(b)[heads() * sums_size() + h]; }
  void clear(idx_t b) {
    for (idx_t h = 0; h < heads(); ++h) {
      sums(b, h).clear();
      if (kind_.parts != sum_parts::values) gate(b, h) = T(1);
    }
  }

 private:
  state_kind kind_;
  kernel_state_extents extents_;
};

/// What the states of all operators have in common.
template <class T>
class state_sequences : public item_sequences<kernel_items<T>> {
  using base = item_sequences<kernel_items<T>>;

 public:
  using base::batch, base::heads, base::value_dim, base::bytes, base::kept, base::rollback;

  /// Throws std::runtime_error if writing fails.
  void write(std::ostream& stream) const {
    this->stream().write(stream, this->lengths_, [&](auto&& visit) { each_number(visit); });
  }
  /// Reads a state of the same kind and shape. Throws std::runtime_error for a stream of another format or version, or
  /// a damaged one, and std::invalid_argument for a state of another kind or shape; *this is then unchanged.
  void read(std::istream& stream) {
    idx_t count = 0;
    each_number([&](const T&) { ++count; });
    this->stream().read(stream, this->lengths_, count, [&](auto&& visit) { each_number(visit); });
    this->forget_kept();
  }

 protected:
  using base::base;

 private:
  state_stream<T> stream() const {
    return {this->name_, this->kind().kind, this->kind().variant, batch(), heads(), this->features(), value_dim()};
  }
  /// Every number of the stream between its header and its checksum.
  template <class Visit>
  void each_number(Visit&& visit) const {
    const idx_t features = this->features();
    for (idx_t n = 0; n < batch() * heads(); ++n) {
      const auto s = this->sums(n / heads(), n % heads());
      if (s.weights) visit(this->gate(n / heads(), n % heads()));
      for (idx_t r = 0; s.weights && r < features; ++r) visit(s.weights[r]);
      for (idx_t r = 0; r < features; ++r)
        for (idx_t d = 0; d < value_dim(); ++d) visit(s.value(r, d));
      for (idx_t r = 0; s.log_scale && r < features; ++r) visit(s.log_scale[r]);
    }
  }
};

}  // namespace detail

/// The sums of one kind of kernel attention; T is float (also for 16-bit elements) or double: the base of linear_state,
/// performer_state and rfa_state. A moved-from state may only be assigned to or destroyed.
template <class T>
class kernel_state : public detail::state_sequences<T> {
  using base = detail::state_sequences<T>;
  using base::name_, base::sums, base::gate;

 public:
  using base::batch, base::heads, base::features, base::value_dim;

  /// Element (r, d) of S, and r of z, of one head; with log scales, times 2^log_scale(r).
  T sum(idx_t b, idx_t h, idx_t r, idx_t d) const {
    return sums(b, h).value(r, d);
  }
  T weight(idx_t b, idx_t h, idx_t r) const { return sums(b, h).weights[r]; }
  T log_scale(idx_t b, idx_t h, idx_t r) const {
    const auto s = sums(b, h);
    return s.log_scale && s.log_scale[r] > detail::no_log_scale<T> ? s.log_scale[r] : T(0);
  }

  /// Adds the state of the tokens that followed: `later` was fed the tokens after those fed to *this. Without gates the
  /// order does not matter. Throws std::invalid_argument for a state of another kind or shape, and if `later` was fed
  /// with decays per channel, because a state has only one product of decays per head.
  void merge(const kernel_state& later) {
    const detail::validator check{name_};
    if (later.kind() != this->kind()) check.fail("a state of the same kind and feature kernel", "another");
    check.extents({{"batch of the other state =", batch(), later.batch()},
                   {"heads of the other state =", heads(), later.heads()},
                   {"features of the other state =", features(), later.features()},
                   {"value dim of the other state =", value_dim(), later.value_dim()}});
    const auto each_head = [&](auto&& f) {
      for (idx_t b = 0; b < batch(); ++b)
        for (idx_t h = 0; h < heads(); ++h) f(b, h);
    };
    each_head([&](idx_t b, idx_t h) {
      if (std::isnan(later.gate(b, h)))
        check.fail("a later state whose decays were per token", "one with decays per channel");
    });
    std::vector<T> factors(static_cast<std::size_t>(2 * detail::kernel_sums<T>::lanes(features())));
    each_head([&](idx_t b, idx_t h) {
      auto mine = sums(b, h);
      detail::combine(mine, later.gate(b, h), later.sums(b, h), mine, factors.data());
      gate(b, h) *= later.gate(b, h);
    });
    this->forget_kept();
    for (idx_t b = 0; b < batch(); ++b) this->length(b) += later.length(b);
  }

 protected:
  kernel_state(const char* name, detail::state_kind which, const kernel_state_extents& extents, idx_t per_feature = 1)
      : base(name, which, extents, per_feature) {}
};

}}  // namespace attn::ATTN_ISA
