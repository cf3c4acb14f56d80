// attn: the delta rule token by token.
//
//   attn::delta_rule_state<float> state({.heads = 16, .dim = 128, .value_dim = 128});
//   attn::delta_rule_step(state, q_t, k_t, v_t, out_t, {.beta = beta_t, .log_decay = g_t});   // one token or many
//   state.append(k, v, {.beta = beta});                        // the same without queries
//   auto branch = state;                                       // a copy: another continuation of the same sequence
//   state.write(file); state.read(file);                       // detail/state_stream.hpp
//
//   attn::delta_rule_state<float> draft({.heads = 16, .dim = 128, .value_dim = 128, .keep = 4});
//   draft.rollback(2); // as if the last two tokens had not been fed
//
// Batch items are independent sequences, of any number of tokens each:
//
//   attn::delta_rule_step(state, q, k, v, out, {.lengths = n});    // item b is fed the first n[b] tokens
//   state.reset(1); state.rollback(0, 2); state.copy_item(0, 1); state.reorder(beams); state.tokens(1)
//
// A million tokens in constant memory: S [dim, value dim] for every batch item and head, dims rounded up to two vectors,
// and `keep` times as much again; bytes() is exact.
//
// There is no merge: a part of a sequence changes the state by S -> M S + B with a matrix M, not by an addition.
#pragma once

#include <attn/kernel/delta_rule.hpp>
#include <attn/kernel/detail/correcting_step.hpp>
#include <attn/kernel/detail/state_stream.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Extents of a delta_rule_state.
struct delta_rule_state_extents {
  idx_t batch = 1;
  /// Value heads; the number of key heads divides it.
  idx_t heads = 1;
  /// Dims of keys and of values.
  idx_t dim = 0, value_dim = 0;
  /// Tokens that rollback can undo.
  idx_t keep = 0;
};

/// Options of delta_rule_step: those of delta_rule that apply to single tokens.
template <class S>
struct delta_rule_step_options {
  static_assert(element<S>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");
  using real = compute_type<S>;

  std::optional<real> scale{};
  /// Item b takes the first lengths[b] tokens, the rest is padding; all tokens unless given.
  list_view<idx_t> lengths{};
  view_field<const real, 3> beta{};     // [B, Hv, n]
  view_field<const real> log_decay{};   // [B, Hv, n, 1 or D]
  std::optional<real> unit_norm_eps{};
};

namespace detail {

/// The inside of delta_rule_state.
template <class S>
class delta_rule_items : public item_state<delta_rule_items<S>, compute_type<S>> {
  using T = compute_type<S>;
  using base = item_state<delta_rule_items<S>, T>;
  using layout = correcting_state<T>;
  using driver = recurrence_driver<rule::correct, T>;

 public:
  using base::batch;

  explicit delta_rule_items(const delta_rule_state_extents& e)
      : base("delta_rule_state", e.batch, e.keep), extents_(e) {
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

  void feed(const char* caller, const delta_views<S>& x, const delta_rule_step_options<S>& options, execution& exec) {
    call_views check(caller);
    kernel_call<T> call = check_delta_rule<S>(check, x, options, options.lengths, {}, {});
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
        [&](const sequence_lengths& first) { correcting_steps(call, first, exec); });
  }
  void clear(idx_t b) { std::fill_n(this->items().at(b), place_size(), T(0)); }

 private:
  idx_t place_size() const { return heads() * layout::size(dim(), value_dim()); }

  delta_rule_state_extents extents_;
};

}  // namespace detail

/// The state of the delta rule for elements of type S. Throws std::invalid_argument for negative extents or sizes no
/// memory can hold. A moved-from state may only be assigned to or destroyed.
template <element S>
class delta_rule_state : public detail::item_sequences<detail::delta_rule_items<S>> {
  using T = compute_type<S>;
  using base = detail::item_sequences<detail::delta_rule_items<S>>;
  using base::of;

 public:
  explicit delta_rule_state(const delta_rule_state_extents& extents) : base(extents) {}

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

  /// delta_rule_step without queries: feeds k [B, Hk, n, D] and v [B, heads, n, Dv].
  template <viewable K, viewable V, class Options = delta_rule_step_options<S>>
  void append(const K& k, const V& v, Options&& options = {}, execution_ref exec = {}) {
    static_assert(std::same_as<S, element_of<const K&>> && std::same_as<S, element_of<const V&>>,
                  "attn: the state, k and v must have one element type");
    this->feed("delta_rule_state::append", {{}, as_view(k), as_view(v), {}, false},
               detail::options_or_default<delta_rule_step_options<S>>(options), detail::execution_of(exec, options));
  }

 private:
  detail::state_stream<T> stream() const { return {this->name_, 4, 0, batch(), heads(), dim(), value_dim()}; }
  template <class Visit>
  void each_number(Visit&& visit) const {
    for (idx_t n = 0; n < batch() * heads(); ++n)
      for (idx_t d = 0; d < dim(); ++d)
        for (idx_t e = 0; e < value_dim(); ++e) visit(*of(n / heads(), n % heads()).at(d, e));
  }
};

/// Feeds n tokens and computes the results of their queries q [B, Hk, n, D]: the next n rows of one delta_rule over the
/// whole stream. For one to three tokens, each is one pass over the state; more are computed in chunks. Throws
/// std::invalid_argument before anything, the state included, changes.
template <element S, viewable Q, viewable K, viewable V, viewable O, class Options = delta_rule_step_options<S>>
void delta_rule_step(delta_rule_state<S>& state, const Q& q, const K& k, const V& v, O&& out, Options&& options = {},
                     execution_ref exec = {}) {
  detail::require_one_element_type<const Q&, const K&, const V&, O>();
  static_assert(std::same_as<S, element_of<const Q&>>, "attn: the state and q must have one element type");
  detail::step_access::of(state).feed("delta_rule_step", {as_view(q), as_view(k), as_view(v), as_view(out)},
                                       detail::options_or_default<delta_rule_step_options<S>>(options),
                                       detail::execution_of(exec, options));
}

}}  // namespace attn::ATTN_ISA
