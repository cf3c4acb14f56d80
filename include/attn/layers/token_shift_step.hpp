// attn: token_shift token by token.
//
//   attn::token_shift_state<float> state({.channels = 512});
//   attn::token_shift_step(state, x_t, out_t, {.mix = m});
//   state.append(x);                                           // the same without results
//
// x is [B, n, C]: one token or many, the next n tokens of one token_shift over the whole stream. A state is fed by one
// call: several mixes of the same tokens take a state each, or token_shift with states as options. Copies, and batch
// items of their own lengths: short_convolution_step.hpp.
//
// Memory   the last token of every batch item, in the element type; bytes() is exact.
#pragma once

#include <attn/layers/detail/recent_tokens.hpp>
#include <attn/layers/token_shift.hpp>

namespace attn { inline namespace ATTN_ISA {

struct token_shift_state_extents {
  idx_t batch = 1;
  idx_t channels = 0;
};

struct token_shift_step_options {
  list_view<idx_t> lengths{};  // item b takes the first lengths[b] tokens, the rest is padding; all tokens unless given
};

/// The last token of a stream of elements of type S. Throws std::invalid_argument for negative extents or sizes no
/// memory can hold. A moved-from state may only be assigned to or destroyed.
template <element S>
class token_shift_state : public detail::item_sequences<detail::recent_tokens<S>> {
  using base = detail::item_sequences<detail::recent_tokens<S>>;

 public:
  explicit token_shift_state(const token_shift_state_extents& extents)
      : base("token_shift_state", extents.batch, extents.channels, 2) {}

  using base::batch, base::channels, base::bytes;

  /// The last token of item b: what final_state holds.
  S value(idx_t b, idx_t c) const { return base::entries()(b, 0, c); }

  /// Feeds x [B, n, C] without results. Throws std::invalid_argument before the state changes.
  template <viewable X>
  void append(const X& x, const append_options& options = {}) {
    static_assert(std::same_as<S, element_of<const X&>>, "attn: the state and x must have one element type");
    base::append_tokens("token_shift_state::append", detail::as_sequence(x), options.lengths);
  }
};

/// Feeds the tokens x [B, n, C] and computes their results. Throws std::invalid_argument before anything, the state
/// included, changes.
template <element S, viewable X, viewable O, class Weights = token_shift_weights<S>,
          class Options = token_shift_step_options>
void token_shift_step(token_shift_state<S>& state, const X& x, O&& out, Weights&& weights = {}, Options&& options = {},
                      execution_ref exec = {}) {
  static_assert(std::same_as<S, element_of<const X&>>, "attn: the state and x must have one element type");
  const auto [from, to] = detail::sequences_of(x, out);
  const auto& w = detail::weights_of<token_shift_weights<S>, true>(weights);
  const auto& given = detail::options_or_default<token_shift_step_options>(options);
  auto& inside = detail::step_access::of(state);
  detail::layer_views check{"token_shift_step", from, to, false};
  inside.check_extents(check, from);
  detail::check_token_shift(check, w.mix, given.lengths);
  check.update("the state", inside.memory());

  detail::run_token_shift<compute_type<S>>({{from, inside.entries(), 2}, tensor_view<const S, 1>(w.mix), given.lengths},
                                           to, detail::plain_execution_of("token_shift_step", exec, options, weights));
  inside.feed(from, given.lengths);
}

}}  // namespace attn::ATTN_ISA
