// attn: linear attention token by token.
//
//   attn::linear_state<float> state({.heads = 8, .features = 64, .value_dim = 64});
//   attn::linear_step(state, q_t, k_t, v_t, out_t);            // what causal linear gives; one token or many
//   state.append(k, v);                                        // the same without queries
//
// A million tokens in constant memory. Every call rounds the sums, and so does every 64th of its tokens, by up to 2^-24
// of them in float: of tokens fed one by one, those whose features are less than that share of the sums are lost. Batch
// items of different lengths, copies, merging, writing and reading: see kernel_state.hpp.
#pragma once

#include <attn/kernel/kernel_state.hpp>
#include <attn/kernel/linear.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Options of linear_step: those of linear that apply to single tokens.
template <class S>
struct linear_step_options {
  using real = compute_type<S>;

  list_view<idx_t> lengths{};  // item b takes the first lengths[b] tokens, the rest is padding; all tokens unless given
  real eps = real(1e-6);
  bool normalise = true;
  view_field<const real, 3> decay{};   // [B, H or Hkv, n]
  real scale = real(1);
  view_field<const real> log_decay{};   // [B, H or Hkv, n, 1 or D]
  view_field<const real, 2> bonus{};    // [H, D]
  key_mask_view key_mask{};             // [B or 1, n]

  operator detail::kernel_parameters<real>() const {
    return {.both_lengths = lengths, .normalise = normalise, .eps = eps, .gate = decay, .key_mask = key_mask,
            .recurrence = {.scale = scale, .log_decay = log_decay, .bonus = bonus}};
  }
};

template <element S>
class linear_state;

namespace detail {

/// A step or append of linear.
template <class S, class F>
void step_linear(const char* name, linear_state<S>& state, const kernel_views<S>& x,
                 const linear_step_options<S>& given, const F& map, execution& exec) {
  if constexpr (require_feature_map<F, compute_type<S>>()) {
    auto& items = step_access::of(state);
    call_views check{name};
    auto call = check_kernel(check, x, given, items.heads());
    auto features = map_features<S>(map, call.shape.dim);
    check_linear(check, call, features.features);
    call.map = &features;
    check_kernel_step(check, call, items);
    run_linear_step(call, items, exec);
  }
}

}  // namespace detail

/// The sums of linear attention for elements of type S. `features` is the number of features of a key: its dim, unless
/// the caller's own map has another number. Throws std::invalid_argument for negative extents or sizes no memory can
/// hold.
template <element S>
class linear_state : public kernel_state<compute_type<S>> {
 public:
  explicit linear_state(const kernel_state_extents& extents)
      : kernel_state<compute_type<S>>("linear_state", {.kind = 1}, extents) {}

  /// linear_step without queries: feeds k [B, Hkv, n, D] and v [B, Hkv, n, Dv].
  template <viewable K, viewable V, class Options = linear_step_options<S>, class Map = feature_maps::elu_plus_one>
  void append(const K& k, const V& v, Options&& options = {}, Map&& map = {}, execution_ref exec = {}) {
    detail::step_linear<S>("linear_state::append", *this, detail::without_queries<S>(k, v),
                           detail::options_or_default<linear_step_options<S>>(options),
                           detail::callable_or_default<feature_maps::elu_plus_one>(map),
                           detail::execution_of(exec, options, map));
  }
};

/// Feeds n tokens and computes the results of their queries q [B, H, n, D]: the next n rows of one causal linear over
/// the whole stream. For one to three tokens, each is one pass over the state; more are computed in chunks. Throws
/// std::invalid_argument before anything, the state included, changes; any other exception, such as one of the caller's
/// map, leaves the state reset.
template <element S, viewable Q, viewable K, viewable V, viewable O, class Options = linear_step_options<S>,
          class Map = feature_maps::elu_plus_one>
void linear_step(linear_state<S>& state, const Q& q, const K& k, const V& v, O&& out, Options&& options = {},
                 Map&& map = {}, execution_ref exec = {}) {
  detail::step_linear<S>("linear_step", state, detail::views_of<S>(q, k, v, out),
                         detail::options_or_default<linear_step_options<S>>(options),
                         detail::callable_or_default<feature_maps::elu_plus_one>(map),
                         detail::execution_of(exec, options, map));
}

}}  // namespace attn::ATTN_ISA

#define ATTN_RUN_IN(T) void run_linear_step(kernel_call<T>&, kernel_items<T>&, execution&)
#include <attn/core/detail/compiled.hpp>
