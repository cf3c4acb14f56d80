// attn: options of the steps of full_softmax and sliding_window.
//
//   attn::full_softmax_step(cache, q_t, k_t, v_t, out_t, {.rotary = rope, .sinks = sinks});
#pragma once

#include <attn/core/rotary.hpp>
#include <attn/softmax/detail/softmax_parameters.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Options of a step of full_softmax or sliding_window for elements of type S.
template <class S>
struct softmax_step_options {
  using real = compute_type<S>;
  static constexpr unsigned shared = detail::fields::of_cache | detail::fields::rotary | detail::fields::all_terms;

  /// As in full_softmax_options.
  std::optional<real> scale{};
  /// Item b has the first lengths[b] tokens of the chunk, the rest is padding; all tokens unless given.
  list_view<idx_t> lengths{};
  /// Rotates the new queries and keys to their positions, which follow the item's tokens so far, before anything else.
  std::optional<rotary_options<S>> rotary{};
  /// As in full_softmax_options: bias and mask [B or 1, H or 1, n or 1, cache.tokens() with the new ones], log_decay
  /// and key_mask likewise for all those tokens, lse [B, H, n].
  view_field<const real> bias{};
  view_field<const real, 3> relative_keys{};
  view_field<const S> relative_queries{};
  view_field<const real, 3> position_queries{};
  view_field<const real, 2> relative_bias{};
  view_field<const real, 3> log_decay{};
  mask_view mask{};
  key_mask_view key_mask{};
  std::optional<real> softcap{};
  list_view<real> alibi_slopes{}, sinks{};
  dropout_options dropout{};
  view_field<real, 3> lse{};
  std::optional<real> skip_below{}, skip_share{};
  skipped_tiles* skipped = nullptr;
};

}}  // namespace attn::ATTN_ISA
