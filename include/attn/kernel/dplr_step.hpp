// attn: the generalised delta rule token by token.
//
//   attn::dplr_state<float> state({.heads = 16, .dim = 64, .value_dim = 64});
//   attn::dplr_step(state, q_t, k_t, v_t, a_t, b_t, out_t, {.log_decay = g_t});    // one token or many
//   state.append(k, v, a, b, {.log_decay = g});                                    // the same without queries
//
// Batch items of their own lengths, copies, writing, reading and .keep for rollback: see kernel_state.hpp; memory, and
// why there is no merge: delta_rule_step.hpp.
#pragma once

#include <attn/kernel/detail/correcting_step_run.hpp>
#include <attn/kernel/dplr.hpp>

namespace attn { inline namespace ATTN_ISA {

using dplr_state_extents = delta_rule_state_extents;

/// Options of dplr_step: those of dplr that apply to single tokens.
template <class S>
struct dplr_step_options {
  using real = compute_type<S>;

  std::optional<real> scale{};
  list_view<idx_t> lengths{};  // item b takes the first lengths[b] tokens, the rest is padding; all tokens unless given
  view_field<const real> log_decay{};   // [B, H, n, 1 or D]
  key_mask_view key_mask{};             // [B or 1, n]

  operator detail::kernel_parameters<real>() const {
    return {.both_lengths = lengths, .key_mask = key_mask, .given_scale = scale,
            .recurrence = {.log_decay = log_decay}};
  }
};

/// The state of dplr for elements of type S. Throws std::invalid_argument for negative extents or sizes no memory can
/// hold. A moved-from state may only be assigned to or destroyed.
template <element S>
class dplr_state : public detail::correcting_state<detail::rule::low_rank, S> {
 public:
  explicit dplr_state(const dplr_state_extents& extents)
      : detail::correcting_state<detail::rule::low_rank, S>("dplr_state", extents) {}

  /// dplr_step without queries: feeds k, a, b [B, heads, n, D] and v [B, heads, n, Dv].
  template <viewable K, viewable V, viewable A, viewable B, class Options = dplr_step_options<S>>
  void append(const K& k, const V& v, const A& a, const B& b, Options&& options = {}, execution_ref exec = {}) {
    detail::step_correcting<detail::rule::low_rank>("dplr_state::append", detail::step_access::of(*this),
                                                    detail::with_rows(detail::without_queries<S>(k, v), a, b),
                                                    detail::options_or_default<dplr_step_options<S>>(options),
                                                    detail::plain_execution_of("dplr_state::append", exec, options));
  }
};

/// Feeds n tokens and computes the results of their queries q [B, H, n, D]: the next n rows of one dplr over the whole
/// stream. For one to three tokens, each is one pass over the state; more are computed in chunks. Throws
/// std::invalid_argument before anything, the state included, changes.
template <element S, viewable Q, viewable K, viewable V, viewable A, viewable B, viewable O,
          class Options = dplr_step_options<S>>
void dplr_step(dplr_state<S>& state, const Q& q, const K& k, const V& v, const A& a, const B& b, O&& out,
               Options&& options = {}, execution_ref exec = {}) {
  detail::step_correcting<detail::rule::low_rank>("dplr_step", detail::step_access::of(state),
                                                  detail::with_rows(detail::views_of<S>(q, k, v, out), a, b),
                                                  detail::options_or_default<dplr_step_options<S>>(options),
                                                  detail::plain_execution_of("dplr_step", exec, options));
}

}}  // namespace attn::ATTN_ISA
