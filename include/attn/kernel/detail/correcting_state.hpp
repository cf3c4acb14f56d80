// attn: the states of the delta rule and of dplr.
#pragma once

#include <attn/kernel/detail/correcting_step.hpp>
#include <attn/kernel/detail/correcting_call.hpp>
#include <attn/kernel/detail/state_stream.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Extents of a delta_rule_state or dplr_state.
struct delta_rule_state_extents {
  idx_t batch = 1;
  /// Value heads; of the delta rule, the number of key heads divides it.
  idx_t heads = 1;
  /// Dims of keys and of values.
  idx_t dim = 0, value_dim = 0;
  /// Tokens that rollback can undo.
  idx_t keep = 0;
};

namespace detail {

/// The inside of such a state.
template <rule R, class S>
class correcting_items : public item_state<correcting_items<R, S>, compute_type<S>> {
  using T = compute_type<S>;
  using base = item_state<correcting_items<R, S>, T>;
  using layout = correcting_state<T>;
  using driver = recurrence_driver<R, T>;

 public:
  using base::batch;

  correcting_items(const char* name, const delta_rule_state_extents& e) : base(name, e.batch, e.keep), extents_(e) {
    const validator check(this->name_);
    check.at_least("heads", 0, e.heads);
    check.at_least("dim", 0, e.dim);
    check.at_least("value dim", 0, e.value_dim);
    // An upper bound of the numbers of a state: padding at most doubles the larger of an extent and 64.
    const idx_t most =
        check.fits("the state of a head", {std::max<idx_t>(e.dim, 64), std::max<idx_t>(e.value_dim, 64), 4});
    check.fits("states", {base::places(), e.batch, e.heads, most});
    base::allocate(e.batch, place_size());
  }

  idx_t heads() const { return extents_.heads; }
  idx_t dim() const { return extents_.dim; }
  idx_t value_dim() const { return extents_.value_dim; }
  panels<T> of(idx_t b, idx_t h) const { return layout::of_head(this->items().at(b), h, dim(), value_dim()); }

  template <class Options>
  void feed(const char* caller, const correcting_views<S>& x, const Options& options, execution& exec) {
    call_views check(caller);
    kernel_call<T> call = check_correcting_forward<R, S>(check, x, options, options.lengths, {}, {});
    check.extents({{"batch = batch of the state", batch(), call.shape.batch},
                   {"value heads = heads of the state", heads(), call.heads},
                   {"key dim = dim of the state", dim(), call.shape.dim},
                   {"value dim = value dim of the state", value_dim(), call.shape.dim_v}});
    check.update("the state", this->memory());
    call.state = this->items();
    const auto limit = exec.limit_threads(driver{call}.work());
    base::feed(
        call.lengths,
        [&](const sequence_lengths& first) {
          kernel_call<T> some = call;
          some.lengths = first;
          driver{some}.run(exec);
        },
        [&](const sequence_lengths& first) { correcting_steps<R>(call, first, exec); });
  }
  void clear(idx_t b) { std::fill_n(this->items().at(b), place_size(), T(0)); }

 private:
  idx_t place_size() const { return heads() * layout::size(dim(), value_dim()); }

  delta_rule_state_extents extents_;
};

/// What delta_rule_state and dplr_state have in common, for elements of type S.
template <rule R, class S>
class correcting_sequences : public item_sequences<correcting_items<R, S>> {
  using T = compute_type<S>;
  using base = item_sequences<correcting_items<R, S>>;
  using base::of;

 public:
  using base::batch, base::heads, base::dim, base::value_dim, base::bytes, base::kept, base::rollback;

  /// Element (d, e) of the state of one head.
  T value(idx_t b, idx_t h, idx_t d, idx_t e) const { return *of(b, h).at(d, e); }

  /// Throws std::runtime_error if writing fails.
  void write(std::ostream& stream) const {
    this->stream().write(stream, this->lengths_, [&](auto&& visit) { each_number(visit); });
  }
  /// Reads a state of the same shape. Throws std::runtime_error for a stream of another format or version, or a damaged
  /// one, and std::invalid_argument for a state of another kind or shape; *this is then unchanged.
  void read(std::istream& stream) {
    this->stream().read(stream, this->lengths_, batch() * heads() * dim() * value_dim(),
                        [&](auto&& visit) { each_number(visit); });
    this->forget_kept();
  }

 protected:
  using base::base;

 private:
  state_stream<T> stream() const {
    return {this->name_, R == rule::correct ? 4 : 5, 0, batch(), heads(), dim(), value_dim()};
  }
  template <class Visit>
  void each_number(Visit&& visit) const {
    for (idx_t n = 0; n < batch() * heads(); ++n)
      for (idx_t d = 0; d < dim(); ++d)
        for (idx_t e = 0; e < value_dim(); ++e) visit(*of(n / heads(), n % heads()).at(d, e));
  }
};

}  // namespace detail

}}  // namespace attn::ATTN_ISA
