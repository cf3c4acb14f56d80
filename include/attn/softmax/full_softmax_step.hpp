// attn: decoding with a cache of keys and values.
//
//   attn::kv_cache<float> cache({.batch = batch, .heads = kv_heads, .dim = 64});
//   attn::full_softmax_step(cache, q_t, k_t, v_t, out_t);      // one token, or a chunk: what causal full_softmax gives
//   attn::full_softmax_step(cache, q, k, v, out, {.lengths = n}); // a different number of tokens for each item
//   attn::paged_cache<float> cache(pool, batch); // or in pages of one pool: paged_cache.hpp
//   attn::full_softmax_cached(cache, q, out, {.causal = false});  // attends what is cached, and appends nothing
//
// Appends k [B, Hkv, n, D] and v [B, Hkv, n, Dv] to the cache, then attends the n queries q [B, H, n, D], which are at
// the last n positions, to all tokens up to their own. The result is the last n rows of one causal full_softmax over
// the whole sequence. With `lengths`, item b has only the first lengths[b] tokens of the chunk. In `score` i and j are
// positions since the start.
//
// A chunk may be a tree of drafts: of the new tokens, `mask` leaves a query those of its branch, the positions of
// `rotary` are their places in it, and keep() of the cache leaves the branch that is accepted (kv_cache.hpp).
//
// full_softmax_cached attends n queries to the tokens a cache has, which stays as it is: for layers that share the
// cache of another one, causally, the queries at the last n positions of their item or where first_position says; for
// caches of pooled keys, with span; and for cross attention, not causally. q is used as it is; rotary.hpp rotates it.
//
// The elements of a cache may have fewer bits than the tokens (kv_cache.hpp); queries and weights are then rounded too:
// to bf16 for a cache of bf16 if the processor multiplies such numbers, to 16-bit integers for one of codes: steps of
// 1/32767 of the largest number of the query, and of the largest weight of some hundred keys. A score then errs by some
// 3e-6 of scale |q| |k|, which matters where that is large (at 1e4: a weight by 3 %), and weights below 1/65534 of the
// largest are 0.
//
// Cost     up to 64 tokens, and any number over a cache of codes (std::int8_t, attn::int4, attn::int8_channels): one
//          reading of the cache for every 64 of them, and for all query heads of up to 256 rows; scratch memory does
//          not depend on its size. With log_decay also one of those of all its tokens, and 16 bytes for each. Longer
//          chunks are attended as full_softmax does. Pages of a paged_cache that several items begin with are read once
//          for up to 256 rows of all of them; which pages an item shares changes no bit of its result.
// Values   `out` is finite where that of full_softmax is.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything, the cache included, changes.
//          Exceptions of `score` are passed on and leave the tokens of the cache as they were, but for the rounding of
//          attn::int4 and attn::int8_channels (kv_cache.hpp); a shared page that was copied before writing to it stays
//          the item's own.
#pragma once

#include <attn/core/kv_cache.hpp>
#include <attn/softmax/detail/full_softmax_step_run.hpp>
#include <attn/softmax/detail/softmax_step.hpp>
#include <attn/softmax/full_softmax.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Options of a step for elements of type S: rotary and those of full_softmax_options that a step has.
template <class S>
using full_softmax_step_options = softmax_step_options<S>;

/// Options of a call over what is cached, for elements of type S.
template <class S>
struct full_softmax_cached_options {
  using real = compute_type<S>;
  static constexpr unsigned shared = detail::fields::of_cache | detail::fields::causal |
                                     detail::fields::first_position | detail::fields::span | detail::fields::all_terms;

  /// As in full_softmax_options; a query sees the tokens up to its own position, or all of its item.
  std::optional<real> scale{};
  bool causal = true;
  /// As in full_softmax_options: of a cache of pooled keys, which has one for every span tokens.
  first_positions first_position{};
  idx_t span = 1;
  /// Item b has the first lengths[b] queries, the rest is padding; all of them unless given.
  list_view<idx_t> lengths{};
  /// As in full_softmax_step_options, for the tokens of the cache.
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

/// Feeds n tokens and attends their queries; options, score and execution may each be left out. The cache is a kv_cache
/// or a paged_cache. See the top of the file.
template <detail::key_value_cache Cache, viewable Q, viewable K, viewable V, viewable O,
          class Options = full_softmax_step_options<element_of<const Q&>>, class Score = detail::no_score>
void full_softmax_step(Cache& cache, const Q& q, const K& k, const V& v, O&& out, Options&& options = {},
                       Score&& score = {}, execution_ref exec = {}) {
  auto call = detail::checked_call<full_softmax_step_options, detail::invariant_form::rows>(
      "full_softmax_step", q, k, v, out, options, score, exec);
  auto& tokens = detail::check_step(call, cache);
  detail::cache_step(call, tokens, [&] { detail::run_full_softmax(call.over(tokens)); });
}

/// Attends q [B, H, n, D] to the tokens of a kv_cache or paged_cache; options, score and execution may each be left
/// out. Several threads may attend one cache at the same time. See the top of the file.
template <detail::key_value_cache Cache, viewable Q, viewable O,
          class Options = full_softmax_cached_options<element_of<const Q&>>, class Score = detail::no_score>
void full_softmax_cached(const Cache& cache, const Q& q, O&& out, Options&& options = {}, Score&& score = {},
                         execution_ref exec = {}) {
  const auto& tokens = detail::step_access::of(cache);
  auto call = detail::checked_cached_call<full_softmax_cached_options, detail::invariant_form::rows>(
      "full_softmax_cached", tokens, q, out, options, score, exec);
  detail::run_full_softmax(call.over(tokens));
}

}}  // namespace attn::ATTN_ISA
