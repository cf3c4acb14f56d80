// attn: lists of blocks for selected_keys.hpp, chosen by vertical and slash lines of the attention of the last queries:
// for the prompts of models trained with full softmax, without training.
//
//   W = softmax(scale Q' K^T) of the last `queries` queries, causal
//   vertical_j = sum_i W_ij, slash_o = sum_i W_{i, position(i) - o}
//   score of a block of keys for a block of queries = the sum of vertical_j over its keys, and of slash_o times the
//       share of these queries whose key at distance o is in it
//   indices = the blocks of the best scores, and first_blocks and local_blocks (those up to the queries' own)
//       the vertical-slash pattern of MInference (Jiang et al. 2024), by blocks
//
//   attn::tensor<std::int32_t> blocks({batch, heads, length, 32});
//   attn::vertical_slash_blocks(q, k, blocks);
//   attn::selected_keys(q, k, v, out, blocks, {.causal = true, .block = 64});
//
// Always causal: query i is at position i + Lk - Lq, with true lengths, or i + first_position, and names no block after
// its own. What it names depends on the last queries and all their keys, so on later tokens too: this is for a prompt
// that is there as a whole. All queries of a block of positions have the same list. Names ascend, -1 behind them; of
// equal scores the earlier is chosen; a weight that is NaN counts as 0.
//
// Shapes   q [B, H, Lq, D], k [B, Hkv, Lk, D]; indices [B, H or Hkv, Lq, n] of std::int32_t or std::int64_t. Lists for
//          key heads go by the sum over their query heads. Rows of padding are -1.
// Cost     2 B H queries Lk D + B H Lq Lk / block^2 operations. Scratch: the packed keys of one list (or of as many as
//          fill the threads), Lk (D + 2) numbers, and per thread 12 Lk.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
#pragma once

#include <attn/softmax/detail/vertical_slash_blocks_run.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Options of vertical_slash_blocks for elements of type S.
template <class S>
struct vertical_slash_blocks_options {
  using real = compute_type<S>;

  /// As in full_softmax_options.
  std::optional<real> scale{};
  list_view<idx_t> lengths{}, query_lengths{}, key_lengths{};
  first_positions first_position{};
  /// Tokens of a block, and queries that attend, the last ones; both >= 1.
  idx_t block = 64, queries = 64;
  /// Blocks that are named first, as in lightning_indexer_options.
  idx_t local_blocks = 1, first_blocks = 1;
};

/// Writes the blocks that the queries choose. See the top of the file.
template <viewable Q, viewable K, class Options = vertical_slash_blocks_options<element_of<const Q&>>>
void vertical_slash_blocks(const Q& q, const K& k, const index_output& indices, Options&& options = {},
                           execution_ref exec = {}) {
  using S = element_of<const Q&>;
  const auto& given = detail::options_or_default<vertical_slash_blocks_options<S>>(options);
  detail::call_views views("vertical_slash_blocks");
  auto call = detail::checked_block_lists<S>(views, q, k, indices, given, true, given.scale,
                                             detail::plain_execution_of("vertical_slash_blocks", exec, options));
  views.at_least("queries", 1, given.queries);
  detail::run_vertical_slash_blocks(call, (std::min)(given.queries, call.shape.queries));
}

}}  // namespace attn::ATTN_ISA
