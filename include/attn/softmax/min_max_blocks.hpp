// attn: lists of blocks for selected_keys.hpp, chosen by what a block's keys could score at most: for models trained
// with full softmax, without training. A cache keeps what steps need.
//
//   bound of a block for query i = sum_d max(q_id max_{j in block} k_jd, q_id min_{j in block} k_jd) >= every q_i . k_j
//   indices = the blocks with the largest bounds, and first_blocks and local_blocks (those up to the query's own)
//       Quest (Tang et al. 2024)
//
//   attn::tensor<std::int32_t> blocks({batch, heads, length, 32});
//   attn::min_max_blocks(q, k, blocks, {.causal = true});
//   attn::selected_keys(q, k, v, out, blocks, {.causal = true, .block = 64});
//
//   attn::min_max_cache<float> cache({.batch = batch, .heads = kv_heads, .dim = 64});   // a kv_cache that keeps bounds
//   cache.append(k_t, v_t);
//   attn::min_max_blocks_cached(cache, q_t, blocks);                          // n tokens, at the last n positions
//   attn::selected_keys_cached(cache, q_t, out_t, blocks, {.block = cache.block()});
//
// Query i is at position i + Lk - Lq, with true lengths, or i + first_position; position p is in block p / block. With
// causal a query names its own block whatever its bound, so that what it names depends on no later token; calls over a
// cache give the same lists. Names ascend, -1 behind them; of equal bounds the earlier is chosen; NaN in q and k is
// passed over, a bound that is NaN counts as -infinity.
//
// Shapes   q [B, H, Lq, D], k [B, Hkv, Lk, D]; indices [B, H or Hkv, Lq, n] of std::int32_t or std::int64_t. Lists for
//          key heads go by the sum over their query heads. Rows of padding are -1.
// Cost     4 B H Lq Lk D / block operations, half of it when causal: 1 / block of full_softmax. Scratch: the bounds of
//          one key head (or of as many as fill the threads), 2 Lk D / block numbers, and per thread some tiles. Over a
//          cache each of up to four queries and lists reads the bounds once.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
#pragma once

#include <attn/softmax/detail/min_max_blocks_run.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Options of min_max_blocks for elements of type S.
template <class S>
struct min_max_blocks_options {
  bool causal = false;
  list_view<idx_t> lengths{}, query_lengths{}, key_lengths{};
  first_positions first_position{};
  /// Tokens of a block, >= 1.
  idx_t block = 64;
  /// Blocks that are named first, as in lightning_indexer_options; with causal local_blocks >= 1.
  idx_t local_blocks = 1, first_blocks = 0;
};

/// Options over a cache, whose blocks they are; always causal.
template <class S>
struct min_max_cached_options {
  /// Item b has the first lengths[b] queries, the rest is padding; all of them unless given.
  list_view<idx_t> lengths{};
  idx_t local_blocks = 1, first_blocks = 0;
};

struct min_max_cache_options {
  /// Tokens of a block, >= 1.
  idx_t block = 64;
};

/// A kv_cache that keeps the bounds of every block, for all that takes a kv_cache. A moved-from cache may only be
/// assigned to or destroyed.
///
/// Memory   that of kv_cache, and batch * heads * 2 dim numbers of the compute type for every `block` tokens.
template <class S>
class min_max_cache : public detail::cached_sequences<detail::summarised_tokens<S, detail::block_bounds>> {
  using base = detail::cached_sequences<detail::summarised_tokens<S, detail::block_bounds>>;

 public:
  using value_type = S;

  /// An empty cache; heads are key heads. Throws std::invalid_argument for extents or a block that do not fit.
  explicit min_max_cache(const state_extents& extents, const min_max_cache_options& options = {})
      : base("min_max_cache", extents, options.block) {}

  /// block(): tokens of a block; all else as in kv_cache.
  using base::block, base::capacity, base::bytes, base::reserve, base::keys, base::values;
};

/// Writes the blocks that the queries choose. See the top of the file.
template <viewable Q, viewable K, class Options = min_max_blocks_options<element_of<const Q&>>>
void min_max_blocks(const Q& q, const K& k, const index_output& indices, Options&& options = {},
                    execution_ref exec = {}) {
  using S = element_of<const Q&>;
  const auto& given = detail::options_or_default<min_max_blocks_options<S>>(options);
  detail::call_views views("min_max_blocks");
  if (given.causal) views.at_least("local_blocks", 1, given.local_blocks);
  auto call = detail::checked_block_lists<S>(views, q, k, indices, given, given.causal, {},
                                             detail::plain_execution_of("min_max_blocks", exec, options));
  detail::run_min_max_blocks(call, {});
}

/// The same for the queries q [B, H, n, D] at the last n positions of a cache, which stays as it is.
template <element S, viewable Q, class Options = min_max_cached_options<S>>
void min_max_blocks_cached(const min_max_cache<S>& cache, const Q& q, const index_output& indices,
                           Options&& options = {}, execution_ref exec = {}) {
  static_assert(std::same_as<S, element_of<const Q&>>, "attn: the cache and q must have one element type");
  const auto& given = detail::options_or_default<min_max_cached_options<S>>(options);
  detail::call_views views("min_max_blocks_cached");
  const auto& tokens = detail::step_access::of(cache);
  views.at_least("local_blocks", 1, given.local_blocks);
  auto call = detail::block_list_call_of<S>(views, as_view(q), tokens.keys(), indices,
                                            {.block = cache.block(), .local_blocks = given.local_blocks,
                                             .first_blocks = given.first_blocks, .causal = true},
                                            detail::plain_execution_of("min_max_blocks", exec, options));
  detail::check_length_list(views, "lengths", given.lengths, call.shape.batch, call.shape.queries);
  call.lengths = {call.shape.queries, call.shape.keys, given.lengths, tokens.lengths()};
  detail::run_min_max_blocks(call, {tokens.sums(), tokens.sums_stride()});
}

}}  // namespace attn::ATTN_ISA
