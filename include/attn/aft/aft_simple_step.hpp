// attn: aft_simple over an endless stream, in memory that does not grow with it.
//
//   attn::aft_simple_state<float> state({.batch = 1, .heads = 8, .dim = 64});
//   attn::aft_simple_step(state, q_t, k_t, v_t, out_t);        // a token or a chunk: what causal aft_simple gives
//
// Batch items are independent sequences, of any number of tokens each:
//
//   attn::aft_simple_step(state, q, k, v, out, {.lengths = n});   // n[b] tokens for item b, the rest is padding
//   state.append(k, v, {.lengths = n}); state.reset(1); state.copy_item(0, 1); state.reorder(beams); state.tokens(1)
//
// Sums are rounded with every token of a step, by up to 2^-24 of them in float, and with every 16th of append(). A key
// whose weight is less than that share of the sum so far is lost.
//
// Memory   3 numbers of the compute type per channel, channels of a head rounded up to whole vectors.
#pragma once

#include <attn/aft/aft_simple.hpp>
#include <attn/aft/detail/aft_simple_step_run.hpp>

namespace attn { inline namespace ATTN_ISA {

/// The sums over all tokens fed so far. append(k, v) feeds tokens k, v [B, H, n, D] without attending. A moved-from
/// state may only be assigned to or destroyed.
template <element S>
class aft_simple_state : public detail::aft_state<S> {
 public:
  /// A state at the start of a stream. Throws std::invalid_argument for a negative extent, a value_dim other than dim,
  /// or sizes no memory can hold.
  explicit aft_simple_state(const state_extents& extents) : detail::aft_state<S>("aft_simple_state", extents) {}
};

/// Feeds n tokens k, v [B, H, n, D] and writes the rows of their queries q [B, H, n, D]: the next n rows of one causal
/// aft_simple over the whole stream. No scratch. Throws std::invalid_argument before anything, the state included,
/// changes.
template <element S, viewable Q, viewable K, viewable V, viewable O, class Options = aft_step_options>
void aft_simple_step(aft_simple_state<S>& state, const Q& q, const K& k, const V& v, O&& out, Options&& options = {},
                     execution_ref exec = {}) {
  auto& inside = detail::step_access::of(state);
  auto call = detail::checked_aft_step<aft_step_options, S>("aft_simple_step", inside.extents(), false, q, k, v,
                                                                  out, tensor_view<const S>(), options, exec);
  const auto& x = call.x;
  x.key_mask.validate(call.views, x.batch, x.length);
  detail::run_aft_simple_step<S>(x, inside, call.exec);
}

}}  // namespace attn::ATTN_ISA
