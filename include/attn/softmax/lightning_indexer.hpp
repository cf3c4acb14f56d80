// attn: the lightning indexer: for every query the keys, or blocks of keys, that many light heads together score
// highest, as lists for selected_keys.hpp.
//
//   I(t, s) = sum_h w[t, h] act(scale q_h,t . k_s)      act = max(0, x), or none
//   indices[t] = the topk keys that query t sees with the largest I(t, s)
//       DeepSeek Sparse Attention (DeepSeek-AI 2025, V3.2)
//
//   attn::tensor<std::int32_t> indices({batch, 1, length, 2048});
//   attn::lightning_indexer(q_idx, k_idx, indices, {.causal = true, .topk = 2048, .w = w});
//   attn::selected_keys(q, k, v, out, indices, {.causal = true});
//
// With block > 1 a list names blocks: b is the keys b block, ..., (b + 1) block - 1, of which the last one may have
// fewer, and its score is the largest I(t, s) among its keys that the query sees; one of which it sees none is never
// named. first_blocks and local_blocks (those up to the query's own, position / block) are named whatever their scores,
// and count within topk. per_head: no sum, but a list for each head (MiniMax-M3: block = 128, topk = 16, local_blocks =
// 1, activation none, scale 1). With span keys stand for several tokens (pooled_tokens.hpp), as in full_softmax.hpp;
// with tail the list also names, beyond topk, the window that the query is in and that is not complete at it
// (DeepSeek-V4: span = 4; Qwen3.8: span = 4 with tail).
//
// Indices ascend; behind the last are -1 where a query sees fewer than topk. Of equal scores (many are 0 with max(0, x))
// the earlier is chosen; NaN counts as -infinity: such a key is named, as any other, only where a query sees fewer than
// topk of larger scores. With `scores` the scores of what is named are written too, -infinity where there is none.
//
// Shapes   q [B, HI, Lq, DI], k [B, 1, Lk, DI], w [B, Lq, HI], 1 unless given; indices [B, 1, Lq, topk] of std::int32_t
//          or std::int64_t, with per_head [B, HI, Lq, topk], with tail topk + 1. Query t is at position t + Lk - Lq, with
//          true lengths, or t + first_position; rows of padding are -1.
// Cost     2 B HI Lq Lk DI operations, half of it when causal; never Lq x Lk numbers. Scratch: the packed keys of one
//          batch item (or of as many as fill the threads), Lk DI numbers, and per thread 50 topk candidates a list and
//          the scores of 12 queries and up to 2048 keys.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
//
// Token by token: lightning_indexer_step.hpp. The gradient of I: lightning_indexer_backward.hpp.
#pragma once

#include <attn/softmax/detail/lightning_indexer_run.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Options of lightning_indexer for elements of type S.
template <class S>
struct lightning_indexer_options {
  using real = compute_type<S>;

  /// As in full_softmax_options; scale is 1 / sqrt(DI) unless given.
  std::optional<real> scale{};
  bool causal = false;
  list_view<idx_t> lengths{}, query_lengths{}, key_lengths{};
  first_positions first_position{};
  idx_t span = 1;
  /// Entries of a list, >= 1, and the keys that each names, >= 1.
  idx_t topk = 2048, block = 1;
  /// Blocks that are named first: the query's own one and those before it, and the first of all.
  idx_t local_blocks = 0, first_blocks = 0;
  /// A list for each head, and no sum over heads.
  bool per_head = false;
  /// With span: an entry more, for the window that the query is in where it is not complete.
  bool tail = false;
  indexer_activation activation = indexer_activation::relu;
  /// Weights of the heads, [B, Lq, HI]; 1 unless given.
  view_field<const real, 3> w{};
  /// Written if given: the scores of what is named, of the shape of indices.
  view_field<real> scores{};
};

/// Writes what every query chooses. See the top of the file.
template <viewable Q, viewable K, class Options = lightning_indexer_options<element_of<const Q&>>>
void lightning_indexer(const Q& q, const K& k, const index_output& indices, Options&& options = {},
                       execution_ref exec = {}) {
  using S = element_of<const Q&>;
  detail::require_one_element_type<const Q&, const K&, const K&, tensor_view<S>>();
  const auto& given = detail::options_or_default<lightning_indexer_options<S>>(options);
  detail::call_views views("lightning_indexer");
  auto call = detail::indexer_call_of<S>(views, as_view(q), as_view(k), indices, given,
                                         {{given.causal, given.span}, given.first_position, given.tail},
                                         detail::plain_execution_of("lightning_indexer", exec, options));
  call.lengths = detail::check_lengths(views, call.shape, given);
  detail::run_lightning_indexer(call);
}

}}  // namespace attn::ATTN_ISA
