// attn: random feature attention token by token.
//
//   attn::rfa_state<float> state({.heads = 8, .features = 256, .value_dim = 64});         // 256 rows of W
//   attn::rfa_step(state, q_t, k_t, v_t, out_t, features);                                // what causal rfa gives
//   state.append(k, v, features);                                                         // the same without queries
//
// Batch items of their own lengths, copies, merging, writing and reading: see kernel_state.hpp.
#pragma once

#include <attn/kernel/detail/kernel_step_run.hpp>
#include <attn/kernel/kernel_state.hpp>
#include <attn/kernel/rfa.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Options of rfa_step: those of rfa that apply to single tokens.
template <class S>
struct rfa_step_options {
  using real = compute_type<S>;

  list_view<idx_t> lengths{};  // item b takes the first lengths[b] tokens, the rest is padding; all tokens unless given
  real eps = real(0), norm_eps = real(0);
  view_field<const real, 3> gate{};   // [B, H or Hkv, n]
  key_mask_view key_mask{};           // [B or 1, n]

  operator detail::kernel_parameters<real>() const {
    return {.both_lengths = lengths, .eps = eps, .norm_eps = norm_eps, .gate = gate, .complement = true,
            .key_mask = key_mask};
  }
};

/// The sums of rfa for elements of type S and `features` rows of W. Throws std::invalid_argument for negative extents
/// or sizes no memory can hold.
template <element S>
class rfa_state : public kernel_state<compute_type<S>> {
 public:
  explicit rfa_state(const kernel_state_extents& extents)
      : kernel_state<compute_type<S>>("rfa_state", {.kind = 3}, extents, 2) {}

  /// rfa_step without queries: feeds k [B, Hkv, n, D] and v [B, Hkv, n, Dv].
  template <viewable K, viewable V, class Features = rfa_step_options<S>, class Options = rfa_step_options<S>>
  void append(const K& k, const V& v, const Features& features = {}, Options&& options = {}, execution_ref exec = {}) {
    detail::step_random_features<detail::rfa_features<compute_type<S>>>(
        "rfa_state::append", detail::step_access::of(*this),
        detail::with_features(detail::without_queries<S>(k, v), features),
        detail::options_or_default<rfa_step_options<S>>(options),
        detail::plain_execution_of("rfa_state::append", exec, options));
  }
};

/// Feeds n tokens and computes the results of their queries q [B, H, n, D]: the next n rows of one causal rfa over the
/// whole stream, always with the same features. Throws std::invalid_argument before anything, the state included,
/// changes; any other exception leaves the state reset.
template <element S, viewable Q, viewable K, viewable V, viewable O, class Features = rfa_step_options<S>,
          class Options = rfa_step_options<S>>
void rfa_step(rfa_state<S>& state, const Q& q, const K& k, const V& v, O&& out, const Features& features = {},
              Options&& options = {}, execution_ref exec = {}) {
  detail::step_random_features<detail::rfa_features<compute_type<S>>>(
      "rfa_step", detail::step_access::of(state), detail::with_features(detail::views_of<S>(q, k, v, out), features),
      detail::options_or_default<rfa_step_options<S>>(options), detail::plain_execution_of("rfa_step", exec, options));
}

}}  // namespace attn::ATTN_ISA
