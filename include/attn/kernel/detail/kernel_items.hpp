// attn: the inside of the states of kernel attention (kernel_state.hpp).
#pragma once

#include <attn/core/detail/item_state.hpp>
#include <attn/kernel/detail/kernel_sums.hpp>
#include <attn/kernel/detail/state_stream.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

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

}}}  // namespace attn::ATTN_ISA::detail
