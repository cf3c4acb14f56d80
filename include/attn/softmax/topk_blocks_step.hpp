// attn: topk_blocks token by token, with a cache of keys, values and the sums of blocks.
//
//   attn::topk_blocks_cache<float> cache({.batch = batch, .heads = kv_heads, .dim = 64}, {.block = 128});
//   attn::topk_blocks_step(cache, q_t, k_t, v_t, out_t, {.topk = 3});    // one token, or a chunk, as topk_blocks
//
// Appends k [B, Hkv, n, D] and v [B, Hkv, n, Dv] to the cache, then attends the n queries q [B, H, n, D], which are at
// the last n positions: the last n rows of one topk_blocks over the whole sequence. In `score` i and j are positions
// since the start. topk_blocks_cached attends queries to the tokens a cache has, for layers that share the cache of
// another one.
//
// Cost     2 B H n (D tokens / block + topk block (D + Dv)) operations: a token reads the sums of all blocks, and the
//          keys and values of those it chooses. An item whose tokens choose fewer than twice the blocks that it has, or
//          are at most 4, is attended with the keys in place, others as in topk_blocks.
// Values   `out` is finite where that of full_softmax is.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything, the cache included, changes.
//          Exceptions of `score` are passed on and leave the cache as it was.
#pragma once

#include <attn/softmax/detail/softmax_step.hpp>
#include <attn/softmax/detail/topk_blocks_step_run.hpp>
#include <attn/softmax/topk_blocks.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Options of a step; the size of blocks is the cache's.
template <class S>
struct topk_blocks_step_options {
  using real = compute_type<S>;
  static constexpr unsigned shared = detail::fields::of_cache | detail::fields::rotary | detail::fields::of_softmax |
                                     detail::fields::skip;

  /// As in topk_blocks_options; lse is [B, H, n]. lengths and rotary as in softmax_step_options.
  std::optional<real> scale{};
  list_view<idx_t> lengths{};
  std::optional<rotary_options<S>> rotary{};
  idx_t topk = 3;
  std::optional<real> softcap{};
  list_view<real> alibi_slopes{}, sinks{};
  view_field<real, 3> lse{};
  std::optional<real> skip_below{}, skip_share{};
  skipped_tiles* skipped = nullptr;
};

/// Options that are the same in all steps.
struct topk_blocks_cache_options {
  /// Keys of a block, >= 1.
  idx_t block = 128;
};

/// Keys and values of the tokens so far, and the sums of the keys of every block. A moved-from cache may only be
/// assigned to or destroyed.
///
/// Memory   that of kv_cache, and batch * heads * dim sums of the compute type for every `block` tokens.
template <class S>
class topk_blocks_cache : public detail::cached_sequences<detail::topk_tokens<S>> {
  using base = detail::cached_sequences<detail::topk_tokens<S>>;

 public:
  /// An empty cache; heads are key heads. Throws std::invalid_argument for extents or a block that do not fit.
  explicit topk_blocks_cache(const state_extents& extents, const topk_blocks_cache_options& options = {})
      : base("topk_blocks_cache", extents, options.block) {}

  /// block(): tokens of a block; all else as in kv_cache.
  using base::block, base::capacity, base::bytes, base::reserve, base::keys, base::values;
};

/// Feeds n tokens and attends their queries; options, score and execution may each be left out. See the top of the
/// file.
template <element S, viewable Q, viewable K, viewable V, viewable O, class Options = topk_blocks_step_options<S>,
          class Score = detail::no_score>
void topk_blocks_step(topk_blocks_cache<S>& cache, const Q& q, const K& k, const V& v, O&& out, Options&& options = {},
                      Score&& score = {}, execution_ref exec = {}) {
  static_assert(std::same_as<S, element_of<const Q&>>, "attn: the cache and q must have one element type");
  auto call = detail::checked_call<topk_blocks_step_options>("topk_blocks_step", q, k, v, out, options, score, exec);
  auto& tokens = detail::check_step(call, cache);
  call.check.at_least("topk", 1, call.options.topk);
  detail::cache_step(call, tokens, [&] { detail::run_topk_blocks_step(call.over(tokens), tokens, call.options.topk); });
}

/// The same for tokens that the cache has already: nothing is appended, and the queries q [B, H, n, D] are at the last
/// n positions of their item (full_softmax_cached). `rotary` is refused: q is used as it is.
template <element S, viewable Q, viewable O, class Options = topk_blocks_step_options<S>,
          class Score = detail::no_score>
void topk_blocks_cached(const topk_blocks_cache<S>& cache, const Q& q, O&& out, Options&& options = {},
                        Score&& score = {}, execution_ref exec = {}) {
  static_assert(std::same_as<S, element_of<const Q&>>, "attn: the cache and q must have one element type");
  const auto& tokens = detail::step_access::of(cache);
  auto call =
      detail::checked_cached_call<topk_blocks_step_options>("topk_blocks_cached", tokens, q, out, options, score, exec);
  call.check.at_least("topk", 1, call.options.topk);
  detail::run_topk_blocks_step(call.over(tokens), tokens, call.options.topk);
}

}}  // namespace attn::ATTN_ISA
