// attn: selected_keys token by token, with a cache of keys and values.
//
//   attn::kv_cache<float> cache({.batch = batch, .heads = kv_heads, .dim = 64});
//   attn::lightning_indexer_step(index_cache, q_idx, k_idx, indices, {.topk = 2048});
//   attn::selected_keys_step(cache, q_t, k_t, v_t, out_t, indices);                  // or in pages: paged_cache.hpp
//
// Appends k [B, Hkv, n, D] and v [B, Hkv, n, Dv] to the cache, then attends the n queries q [B, H, n, D], which are at
// the last n positions, to those of the tokens up to their own that their lists name: the last n rows of one causal
// selected_keys over the whole sequence. indices [B or 1, H or Hkv or 1, n, m] name positions since the start, or
// blocks of them, among the tokens of the cache with the new ones. In `score` i and j are positions since the start.
// selected_keys_cached attends queries to the tokens a cache has, for layers that share the cache of another one.
//
// The cache is any kv_cache or paged_cache, also of fewer bits (full_softmax_step.hpp says what is then rounded). Only
// the rows that lists name are read, and of codes what their blocks have in common, a reference or scales, which then
// serve few keys: a number of single keys takes 3.4 times as long as in a step over all tokens with std::int8_t, 4.1
// with attn::int4 and attn::int8_channels, 1.2 in float, which is .76, 1.1 and 1.1 of the time in float (one of 8
// tokens of 4096, D 128, Zen 1); of blocks of 64 keys 1.4.
//
// Cost     2 B H n m block (D + Dv) operations, and one reading of the named rows for every list.
// Values   `out` is finite where that of full_softmax is.
// Throws   as full_softmax_step, and for names that do not fit.
#pragma once

#include <attn/core/kv_cache.hpp>
#include <attn/softmax/detail/selected_keys_step_run.hpp>
#include <attn/softmax/detail/softmax_step.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Options of a step for elements of type S.
template <class S>
struct selected_keys_step_options {
  using real = compute_type<S>;
  static constexpr unsigned shared = detail::fields::of_cache | detail::fields::rotary | detail::fields::masks |
                                     detail::fields::of_softmax | detail::fields::skip;

  /// As in selected_keys_options; lse is [B, H, n], mask [B or 1, H or 1, n or 1, cache.tokens() with the new ones]
  /// and key_mask as long. lengths and rotary as in softmax_step_options.
  std::optional<real> scale{};
  list_view<idx_t> lengths{};
  std::optional<rotary_options<S>> rotary{};
  idx_t block = 1;
  mask_view mask{};
  key_mask_view key_mask{};
  std::optional<real> softcap{};
  list_view<real> alibi_slopes{}, sinks{};
  view_field<real, 3> lse{};
  std::optional<real> skip_below{}, skip_share{};
  skipped_tiles* skipped = nullptr;
};

/// Options of a call over what is cached, for elements of type S, as in selected_keys_options; lengths as in a step.
template <class S>
struct selected_keys_cached_options {
  using real = compute_type<S>;
  static constexpr unsigned shared = detail::fields::of_cache | detail::fields::causal |
                                     detail::fields::first_position | detail::fields::span | detail::fields::masks |
                                     detail::fields::of_softmax | detail::fields::skip;

  std::optional<real> scale{};
  bool causal = true;
  list_view<idx_t> lengths{};
  /// Where the queries are; of a cache of pooled keys, which has one for every span tokens.
  first_positions first_position{};
  idx_t block = 1, span = 1;
  mask_view mask{};
  key_mask_view key_mask{};
  std::optional<real> softcap{};
  list_view<real> alibi_slopes{}, sinks{};
  view_field<real, 3> lse{};
  std::optional<real> skip_below{}, skip_share{};
  skipped_tiles* skipped = nullptr;
};

/// Feeds n tokens and attends their queries; options, score and execution may each be left out. The cache is a kv_cache
/// or a paged_cache. See the top of the file.
template <detail::key_value_cache Cache, viewable Q, viewable K, viewable V, viewable O,
          class Options = selected_keys_step_options<element_of<const Q&>>, class Score = detail::no_score>
void selected_keys_step(Cache& cache, const Q& q, const K& k, const V& v, O&& out, const index_view& indices,
                        Options&& options = {}, Score&& score = {}, execution_ref exec = {}) {
  auto call =
      detail::checked_call<selected_keys_step_options>("selected_keys_step", q, k, v, out, options, score, exec);
  auto& tokens = detail::check_step(call, cache);
  call.lengths = {call.shape.queries, call.shape.queries, call.options.lengths, {}};
  call.shape.keys = tokens.tokens_after(call.shape.queries, call.options.lengths);
  const auto lists = detail::check_lists(call.views, call.shape, call.lengths, indices, call.options.block);
  detail::cache_step(call, tokens, [&] { detail::run_selected_keys_step(call.over(tokens), lists); });
}

/// The same for tokens that the cache has already: nothing is appended, and the queries q [B, H, n, D], which are used as
/// they are, are at the last n positions of their item, or where first_position says (full_softmax_cached).
template <detail::key_value_cache Cache, viewable Q, viewable O,
          class Options = selected_keys_cached_options<element_of<const Q&>>, class Score = detail::no_score>
void selected_keys_cached(const Cache& cache, const Q& q, O&& out, const index_view& indices, Options&& options = {},
                          Score&& score = {}, execution_ref exec = {}) {
  const auto& tokens = detail::step_access::of(cache);
  auto call = detail::checked_cached_call<selected_keys_cached_options>("selected_keys_cached", tokens, q, out, options,
                                                                      score, exec);
  detail::check_block_of_span(call.views, call.options);
  const auto lists = detail::check_lists(call.views, call.shape, call.lengths, indices, call.options.block);
  detail::run_selected_keys_step(call.over(tokens), lists);
}

}}  // namespace attn::ATTN_ISA
