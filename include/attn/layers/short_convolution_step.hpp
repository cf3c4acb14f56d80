// attn: short_convolution token by token.
//
//   attn::short_convolution_state<float> state({.channels = 512, .width = 4});
//   attn::short_convolution_step(state, x_t, out_t, {.weight = w}, {.activation = attn::activation::silu});
//   state.append(x);                                           // the same without results
//   auto branch = state;                                       // a copy: another continuation of the same sequence
//
// x is [B, n, C]: one token or many, the next n tokens of one short_convolution over the whole stream. Batch items are
// independent sequences, of any number of tokens each:
//
//   attn::short_convolution_step(state, x, out, weights, {.lengths = n});    // item b is fed the first n[b] tokens
//   state.reset(1); state.copy_item(0, 1); state.reorder(beams); state.tokens(1)
//
// Memory   the last w - 1 tokens of every batch item, in the element type; bytes() is exact.
#pragma once

#include <attn/layers/detail/recent_tokens.hpp>
#include <attn/layers/short_convolution.hpp>

namespace attn { inline namespace ATTN_ISA {

struct short_convolution_state_extents {
  idx_t batch = 1;
  idx_t channels = 0;
  idx_t width = 1;  // columns of the weight
};

struct short_convolution_step_options {
  std::optional<attn::activation> activation{};   // none unless given
  list_view<idx_t> lengths{};  // item b takes the first lengths[b] tokens, the rest is padding; all tokens unless given
};

/// The last tokens of a stream of elements of type S. Throws std::invalid_argument for negative extents or sizes no
/// memory can hold. A moved-from state may only be assigned to or destroyed.
template <element S>
class short_convolution_state : public detail::item_sequences<detail::recent_tokens<S>> {
  using base = detail::item_sequences<detail::recent_tokens<S>>;

 public:
  explicit short_convolution_state(const short_convolution_state_extents& extents)
      : base("short_convolution_state", extents.batch, extents.channels, extents.width) {}

  using base::batch, base::channels, base::width, base::bytes;

  /// Entry e of item b, the oldest first: what final_state holds.
  S value(idx_t b, idx_t e, idx_t c) const { return base::entries()(b, e, c); }

  /// Feeds x [B, n, C] without results. Throws std::invalid_argument before the state changes.
  template <viewable X>
  void append(const X& x, const append_options& options = {}) {
    static_assert(std::same_as<S, element_of<const X&>>, "attn: the state and x must have one element type");
    base::append_tokens("short_convolution_state::append", detail::as_sequence(x), options.lengths);
  }
};

/// Feeds the tokens x [B, n, C] and computes their results. Throws std::invalid_argument before anything, the state
/// included, changes.
template <element S, viewable X, viewable O, class Weights = short_convolution_weights<S>,
          class Options = short_convolution_step_options>
void short_convolution_step(short_convolution_state<S>& state, const X& x, O&& out, const Weights& weights,
                            Options&& options = {}, execution_ref exec = {}) {
  static_assert(std::same_as<S, element_of<const X&>>, "attn: the state and x must have one element type");
  const auto [from, to] = detail::sequences_of(x, out);
  const auto& w = detail::weights_of<short_convolution_weights<S>>(weights);
  const auto& given = detail::options_or_default<short_convolution_step_options>(options);
  auto& inside = detail::step_access::of(state);
  detail::layer_views check{"short_convolution_step", from, to, false};
  inside.check_extents(check, from);
  const idx_t taps = detail::check_convolution(check, w.weight, w.bias, given.lengths);
  check.equal("weight columns = width of the state", state.width(), taps);
  check.update("the state", inside.memory());

  detail::run_short_convolution<compute_type<S>>(
      detail::make_convolution<S>(from, w, given.activation, given.lengths, inside.entries()), to,
      detail::plain_execution_of("short_convolution_step", exec, options));
  inside.feed(from, given.lengths);
}

}}  // namespace attn::ATTN_ISA
