// attn: the delta rule token by token.
//
//   attn::delta_rule_state<float> state({.heads = 16, .dim = 128, .value_dim = 128});
//   attn::delta_rule_step(state, q_t, k_t, v_t, out_t, {.beta = beta_t, .log_decay = g_t});   // one token or many
//   state.append(k, v, {.beta = beta});                        // the same without queries
//
// Batch items of their own lengths, copies, writing, reading and .keep for rollback: see kernel_state.hpp.
//
// A million tokens in constant memory: S [dim, value dim] for every batch item and head, value dim rounded up to two
// vectors, and `keep` times as much again; bytes() is exact.
//
// There is no merge: a part of a sequence changes the state by S -> M S + B with a matrix M, not by an addition.
#pragma once

#include <attn/kernel/delta_rule.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Options of delta_rule_step: those of delta_rule that apply to single tokens.
template <class S>
struct delta_rule_step_options {
  using real = compute_type<S>;

  std::optional<real> scale{};
  list_view<idx_t> lengths{};  // item b takes the first lengths[b] tokens, the rest is padding; all tokens unless given
  view_field<const real, 3> beta{};     // [B, Hv, n]
  view_field<const real> log_decay{};   // [B, Hv, n, 1 or D]
  key_mask_view key_mask{};             // [B or 1, n]
  std::optional<real> unit_norm_eps{};

  operator detail::kernel_parameters<real>() const {
    return {.both_lengths = lengths, .key_mask = key_mask, .given_scale = scale, .given_unit_norm_eps = unit_norm_eps,
            .recurrence = {.log_decay = log_decay, .beta = beta}};
  }
};

/// The state of the delta rule for elements of type S. Throws std::invalid_argument for negative extents or sizes no
/// memory can hold. A moved-from state may only be assigned to or destroyed.
template <element S>
class delta_rule_state : public detail::correcting_state<detail::rule::correct, S> {
 public:
  explicit delta_rule_state(const delta_rule_state_extents& extents)
      : detail::correcting_state<detail::rule::correct, S>("delta_rule_state", extents) {}

  /// delta_rule_step without queries: feeds k [B, Hk, n, D] and v [B, heads, n, Dv].
  template <viewable K, viewable V, class Options = delta_rule_step_options<S>>
  void append(const K& k, const V& v, Options&& options = {}, execution_ref exec = {}) {
    detail::step_correcting<detail::rule::correct>(
        "delta_rule_state::append", detail::step_access::of(*this), detail::without_queries<S>(k, v),
        detail::options_or_default<delta_rule_step_options<S>>(options), detail::execution_of(exec, options));
  }
};

/// Feeds n tokens and computes the results of their queries q [B, Hk, n, D]: the next n rows of one delta_rule over the
/// whole stream. For one to three tokens, each is one pass over the state; more are computed in chunks. Throws
/// std::invalid_argument before anything, the state included, changes.
template <element S, viewable Q, viewable K, viewable V, viewable O, class Options = delta_rule_step_options<S>>
void delta_rule_step(delta_rule_state<S>& state, const Q& q, const K& k, const V& v, O&& out, Options&& options = {},
                     execution_ref exec = {}) {
  detail::step_correcting<detail::rule::correct>(
      "delta_rule_step", detail::step_access::of(state), detail::views_of<S>(q, k, v, out),
      detail::options_or_default<delta_rule_step_options<S>>(options), detail::execution_of(exec, options));
}

}}  // namespace attn::ATTN_ISA
