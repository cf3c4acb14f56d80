// attn: lists of blocks for selected_keys.hpp, chosen by sums along antidiagonals: for models trained with full
// softmax, without training.
//
//   A(I, J) = scale / stride * sum_{n < stride} q_{(I + 1) stride - 1 - n} . k_{J stride + n}
//   score of a block of keys for a block of queries = the sum of softmax_J(A(I, J)) over the I and J in them
//   indices = the fewest blocks of keys whose scores reach `threshold` of all together, at most as many as a list has
//       entries, with first_blocks and local_blocks (those up to the queries' own) whatever their scores
//       XAttention (Xu et al. 2025)
//
//   attn::tensor<std::int32_t> blocks({batch, heads, length, 32});
//   attn::antidiagonal_blocks(q, k, blocks, {.causal = true});
//   attn::selected_keys(q, k, v, out, blocks, {.causal = true, .block = 128});
//
// Rows I and blocks of queries are those of positions: query i is at position i + Lk - Lq, with true lengths, or
// i + first_position. Tokens that are not there count as zeros. With causal J <= I, and queries see no block after
// their own; what a block of queries names depends on all tokens up to its end, not on later ones. All queries of a
// block have the same list. Names ascend, -1 behind them; of equal scores the earlier is chosen; NaN counts as
// -infinity.
//
// Shapes   q [B, H, Lq, D], k [B, Hkv, Lk, D]; indices [B, H or Hkv, Lq, n] of std::int32_t or std::int64_t. Lists for
//          key heads go by the sum over their query heads. Rows of padding are -1.
// Cost     2 B H Lq Lk D / stride operations, half of it when causal: 1 / (2 stride) of full_softmax. Scratch: the
//          packed keys of one key head (or of as many as fill the threads), Lk D numbers, and per thread
//          24 Lk / stride.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
#pragma once

#include <attn/softmax/detail/antidiagonal_blocks_run.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Options of antidiagonal_blocks for elements of type S.
template <class S>
struct antidiagonal_blocks_options {
  using real = compute_type<S>;

  /// As in full_softmax_options.
  std::optional<real> scale{};
  bool causal = false;
  list_view<idx_t> lengths{}, query_lengths{}, key_lengths{};
  first_positions first_position{};
  /// Tokens of a block, and those of an antidiagonal, from 1 to 1024, which divides block.
  idx_t block = 128, stride = 16;
  /// Share of the scores to reach, above 0; with 1 lists are as long as they can be.
  real threshold = real(0.9);
  /// Blocks that are named first, as in lightning_indexer_options.
  idx_t local_blocks = 1, first_blocks = 1;
};

/// Writes the blocks that the queries choose. See the top of the file.
template <viewable Q, viewable K, class Options = antidiagonal_blocks_options<element_of<const Q&>>>
void antidiagonal_blocks(const Q& q, const K& k, const index_output& indices, Options&& options = {},
                         execution_ref exec = {}) {
  using S = element_of<const Q&>;
  const auto& given = detail::options_or_default<antidiagonal_blocks_options<S>>(options);
  detail::call_views views("antidiagonal_blocks");
  auto call = detail::checked_block_lists<S>(views, q, k, indices, given, given.causal, given.scale,
                                             detail::plain_execution_of("antidiagonal_blocks", exec, options));
  if (given.stride < 1 || given.stride > 1024) views.fail("a stride from 1 to 1024", given.stride);
  if (given.block % given.stride != 0) views.fail({"a stride that divides block = ", given.block}, given.stride);
  if (!(given.threshold > 0 && given.threshold <= 1)) views.fail("threshold above 0, up to 1", given.threshold);
  call.block = (std::min)(given.block, detail::round_up(std::max<idx_t>(1, call.shape.keys), given.stride));
  detail::run_antidiagonal_blocks(call, given.stride, given.threshold);
}

}}  // namespace attn::ATTN_ISA
