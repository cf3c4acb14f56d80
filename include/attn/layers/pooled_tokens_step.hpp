// attn: pooled_tokens token by token.
//
//   attn::pooled_tokens_state<float> state({.channels = 128, .window = 4, .overlap = true, .logits = true});
//   const attn::idx_t rows = state.rows(n);                    // windows that n more tokens complete: 0 or 1 for one
//   attn::pooled_tokens_step(state, x_t, out, {.logits = z_t, .bias = b});
//   state.append(x, z);                                        // the same without results
//
// x and z are [B, H, n, C]: the next n tokens of one pooled_tokens over the whole stream. out is [B, H, R, D] with R of
// at least state.rows(n, lengths); item b gets the rows of the windows it completes, and zeros behind. Batch items are
// independent sequences, of any number of tokens each:
//
//   attn::pooled_tokens_step(state, x, out, {.lengths = n});   // item b is fed the first n[b] tokens
//   state.reset(1); state.copy_item(0, 1); state.reorder(beams); state.tokens(1); state.windows(1)
//
// Memory   of every item and head x, and z where there are logits, of m - 1 tokens, and with overlap the first halves
//          of m more, in the element type; bytes() is exact.
#pragma once

#include <attn/layers/detail/pooled_items.hpp>
#include <attn/layers/pooled_tokens.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Extents of a pooled_tokens_state.
struct pooled_tokens_state_extents {
  idx_t batch = 1;
  idx_t heads = 1;
  /// Of x: with overlap twice those of a result.
  idx_t channels = 0;
  /// Tokens of a window.
  idx_t window = 1;
  bool overlap = false;
  /// Whether tokens come with logits.
  bool logits = false;
};

/// Options of pooled_tokens_step for elements of type S.
template <class S>
struct pooled_tokens_step_options {
  /// Item b takes the first lengths[b] tokens, the rest is padding; all tokens unless given.
  list_view<idx_t> lengths{};
  view_field<const S> logits{};    // to be given where the state has them
  view_field<const S, 3> bias{};   // 0 unless given
};

/// The unfinished window of a stream of elements of type S, and with overlap the first halves of the window before it.
/// Throws std::invalid_argument for extents that are negative, do not fit or that no memory can hold. A moved-from
/// state may only be assigned to or destroyed.
template <element S>
class pooled_tokens_state : public detail::item_sequences<detail::pooled_items<S>> {
  using base = detail::item_sequences<detail::pooled_items<S>>;

 public:
  explicit pooled_tokens_state(const pooled_tokens_state_extents& extents)
      : base(detail::pooled_extents{extents.batch, extents.heads, extents.channels, extents.window, extents.overlap,
                                    extents.logits}) {}

  using base::batch, base::heads, base::channels, base::window, base::bytes;

  /// Complete windows so far, of one item.
  idx_t windows(idx_t item) const { return base::tokens(item) / window(); }
  /// How many windows the next `count` tokens complete, of which item b takes lengths[b] or all: most of any item.
  idx_t rows(idx_t count, list_view<idx_t> lengths = {}) const {
    const detail::validator check{"pooled_tokens_state::rows"};
    check.at_least("tokens", 0, count);
    detail::check_length_list(check, "lengths", lengths, batch(), count);
    return base::rows_of(count, lengths);
  }

  /// Feeds x [B, H, n, C] without results. Throws std::invalid_argument before the state changes.
  template <viewable X>
  void append(const X& x, const append_options& options = {}) {
    feed_checked(as_view(x), {}, options);
  }
  /// The same with their logits.
  template <viewable X, viewable Z>
  void append(const X& x, const Z& logits, const append_options& options = {}) {
    feed_checked(as_view(x), as_view(logits), options);
  }

 private:
  void feed_checked(const tensor_view<const S>& x, const tensor_view<const S>& logits, const append_options& options) {
    detail::call_views check{"pooled_tokens_state::append"};
    check.read("x", x);
    base::check_tokens(check, x, logits, {}, options.lengths);
    check.update("the state", this->memory());
    base::feed(x, logits, options.lengths);
  }
};

/// Feeds the tokens x [B, H, n, C] and computes the rows of the windows that they complete. Throws
/// std::invalid_argument before anything, the state included, changes.
template <element S, viewable X, viewable O, class Options = pooled_tokens_step_options<S>>
void pooled_tokens_step(pooled_tokens_state<S>& state, const X& x, O&& out, Options&& options = {},
                        execution_ref exec = {}) {
  static_assert(std::same_as<S, element_of<const X&>>, "attn: the state and x must have one element type");
  static_assert(std::same_as<S, element_of<O&>>, "attn: x and out must have one element type");
  const auto& given = detail::options_or_default<pooled_tokens_step_options<S>>(options);
  const tensor_view<const S> from = as_view(x);
  const tensor_view<S> to = as_view(out);
  auto& inside = detail::step_access::of(state);
  detail::call_views check{"pooled_tokens_step"};
  check.read("x", from);
  inside.check_tokens(check, from, given.logits, given.bias, given.lengths);
  check.write("out", to, {{"out batch = x batch", from.extent(0)},
                          {"out heads = x heads", from.extent(1)},
                          {},
                          {"out dim = channels of a result", inside.dim()}});
  check.at_least("out length", inside.rows_of(from.extent(2), given.lengths), to.extent(2));
  check.update("the state", inside.memory());

  detail::run_pooled_tokens<compute_type<S>>(inside.call_of(from, given.logits, given.bias, given.lengths), to,
                                             detail::plain_execution_of("pooled_tokens_step", exec, options));
  inside.feed(from, given.logits, given.lengths);
}

}}  // namespace attn::ATTN_ISA
