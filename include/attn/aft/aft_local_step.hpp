// attn: aft_local over an endless stream, in memory that does not grow with it.
//
//   attn::aft_local_state<float> state({.batch = 1, .heads = 8, .dim = 64}, {.window = 128});
//   attn::aft_local_step(state, q_t, k_t, v_t, out_t, w, {.band = true});    // as causal aft_local with window = 128
//
// Batch items are independent sequences, see aft_simple_step.hpp.
//
// Memory   3 (window + 1) numbers of the compute type per channel, channels of a head rounded up to whole vectors.
#pragma once

#include <attn/aft/aft_local.hpp>
#include <attn/aft/detail/aft_step_run.hpp>

namespace attn { inline namespace ATTN_ISA {

struct aft_local_state_options {
  idx_t window = 128;  ///< tokens with a bias of their own, >= 1: the window of aft_local
};

/// The last tokens of a stream and the sums over those before them. append(k, v) feeds tokens k, v [B, H, n, D] without
/// attending. A moved-from state may only be assigned to or destroyed.
template <element S>
class aft_local_state : public detail::aft_state<S> {
 public:
  /// A state at the start of a stream. Throws std::invalid_argument for extents that do not fit or sizes no memory can
  /// hold.
  explicit aft_local_state(const state_extents& extents, const aft_local_state_options& options = {})
      : detail::aft_state<S>("aft_local_state", extents, options.window) {}
};

struct aft_local_step_options {
  list_view<idx_t> lengths{};  ///< item b takes the first lengths[b] tokens, the rest is padding; all unless given
  bool band = false;  ///< w is a band [L, 2 window - 1] instead of [L, L]
  bool gate = true;   ///< multiply by sigmoid(q); without, q is not read
  key_mask_view key_mask{};  ///< [B or 1, n]

  operator detail::aft_parameters() const { return {lengths, true, gate, key_mask}; }
};

/// Feeds n tokens k, v [B, H, n, D] and writes the rows of their queries q [B, H, n, D]: the next n rows of one causal
/// aft_local over the whole stream. w is that of the longest sequence: [L, L], [H, L, L], or as band [L, 2 window - 1],
/// [H, L, 2 window - 1], with L >= tokens so far + n; row t belongs to the t-th token since the start. Cost and scratch
/// do not depend on how many tokens there were. Throws std::invalid_argument before anything, the state included,
/// changes; if memory runs out, the state is reset.
template <element S, viewable Q, viewable K, viewable V, viewable O, viewable W, class Options = aft_local_step_options>
void aft_local_step(aft_local_state<S>& state, const Q& q, const K& k, const V& v, O&& out, const W& w,
                    Options&& options = {}, execution_ref exec = {}) {
  const bool band = detail::options_or_default<aft_local_step_options>(options).band;
  auto& inside = detail::step_access::of(state);
  auto call = detail::checked_aft_step<aft_local_step_options, S>("aft_local_step", inside.extents(), false, q, k, v,
                                                                  out, w, options, exec);
  const auto& x = call.x;
  x.key_mask.validate(call.views, x.batch, x.length);
  const detail::validator& check = call.views;
  detail::check_biases(check, x);
  const idx_t window = state.window(), tokens = inside.tokens_after(x.length, x.lengths);
  check.at_least("w rows", tokens, x.w.extents[2]);
  if (band)
    check.equal("w columns = 2 * window - 1 =", 2 * window - 1, x.w.extents[3]);
  else
    check.at_least("w columns", tokens, x.w.extents[3]);
  const auto layout = band ? detail::aft_window_layout::band : detail::aft_window_layout::square;
  detail::run_aft_window_step<S>(x, layout, inside, call.exec);
}

}}  // namespace attn::ATTN_ISA
