// attn: aft_conv over an endless stream, in memory that does not grow with it.
//
//   attn::aft_conv_state<float> state({.batch = 1, .heads = 8, .dim = 64}, {.width = 31});
//   attn::aft_conv_step(state, q_t, k_t, v_t, out_t, w);              // as causal aft_conv with w [heads, 31]
//
// Batch items are independent sequences, see aft_simple_step.hpp.
//
// Memory   3 (width / 2 + 2) numbers of the compute type per channel, channels of a head rounded up to whole vectors.
#pragma once

#include <attn/aft/aft_conv.hpp>
#include <attn/aft/detail/aft_step_run.hpp>

namespace attn { inline namespace ATTN_ISA {

struct aft_conv_state_options {
  idx_t width = 1;  ///< width of the kernels, odd
};

/// The last tokens of a stream and the sums over those before them. append(k, v) feeds tokens k [B, H, n, D] or
/// [B, H, n, 1], v [B, H, n, D], without attending. A moved-from state may only be assigned to or destroyed.
template <element S>
class aft_conv_state : public detail::aft_state<S, true> {
  static constexpr const char* name = "aft_conv_state";
  static idx_t window_of(idx_t width) {
    const detail::validator check{name};
    check.at_least("width", 1, width);
    if (width % 2 == 0) check.fail("odd width", width);
    return width / 2 + 1;
  }

 public:
  /// A state at the start of a stream. Throws std::invalid_argument for extents that do not fit or sizes no memory can
  /// hold.
  explicit aft_conv_state(const state_extents& extents, const aft_conv_state_options& options = {})
      : detail::aft_state<S, true>(name, extents, window_of(options.width)) {}

  idx_t width() const { return 2 * this->window() - 1; }
};

/// Feeds n tokens k [B, H, n, D] or [B, H, n, 1], v [B, H, n, D] and writes the rows of their queries q [B, H, n, D]:
/// the next n rows of one causal aft_conv over the whole stream. w [H, width] or [1, width]. Cost and scratch do not
/// depend on how many tokens there were. Throws std::invalid_argument before anything, the state included, changes; if
/// memory runs out, the state is reset.
template <element S, viewable Q, viewable K, viewable V, viewable O, viewable W, class Options = aft_step_options>
void aft_conv_step(aft_conv_state<S>& state, const Q& q, const K& k, const V& v, O&& out, const W& w,
                   Options&& options = {}, execution_ref exec = {}) {
  auto& inside = detail::step_access::of(state);
  auto call = detail::checked_aft_step<aft_step_options, S>("aft_conv_step", inside.extents(), true, q, k, v, out, w,
                                                            options, exec);
  auto& x = call.x;
  x.key_mask.validate(call.views, x.batch, x.length);
  detail::check_kernels(call.views, x, false);
  call.views.equal("w width = state width", state.width(), x.w.extents[3]);
  detail::run_aft_window_step<S>(x, detail::aft_window_layout::kernel, inside, call.exec);
}

}}  // namespace attn::ATTN_ISA
