// attn: softmax attention over the blocks of keys whose means a query matches best.
//
//   out_i = softmax attention (full_softmax.hpp) over the keys of the query's own block up to its position, and of the
//   topk - 1 earlier blocks with the largest q_i . mean of the block's keys: all of them where there are fewer.
//       MoBA, Lu et al. 2025; the selection of NSA, Yuan et al. 2025
//
//   attn::topk_blocks(q, k, v, out, {.block = 128, .topk = 3});
//   attn::topk_blocks(q, k, v, out, {.block = 64, .topk = 16, .lse = lse}, threads);
//
// Position p is in block p / block. Always causal; the query's own block counts as one of topk. Every query head
// chooses separately among the blocks of its key head, by q and k as given, without scale and terms. Of blocks that
// match equally well the earlier is chosen; NaN counts as -infinity.
//
// Shapes   as full_softmax: query i is at position i + Lk - Lq, with true lengths.
// Cost     2 B H Lq (topk block (D + Dv) + D Lk / (2 block)) operations. Scratch: for one key head (or as many as fill
//          the threads) the packed keys and values, about Lk (D + Dv) numbers, and D Lk / block numbers (Lq Dv more for
//          every head in progress where rows of out cannot hold unfinished sums: 16-bit types, strides, dims that are
//          no multiple of a vector); where queries are fewer than blocks / topk, per thread those of a block alone.
// Values   `out` is finite where that of full_softmax is.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
//
// Token by token: topk_blocks_step.hpp.
#pragma once

#include <attn/softmax/detail/topk_blocks_run.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Options of topk_blocks for elements of type S: those of pattern_softmax, and
template <class S>
struct topk_blocks_options {
  using real = compute_type<S>;
  static constexpr unsigned shared = detail::fields::lengths | detail::fields::of_softmax | detail::fields::skip;

  std::optional<real> scale{};
  list_view<idx_t> lengths{}, query_lengths{}, key_lengths{};
  /// Keys of a block, >= 1.
  idx_t block = 128;
  /// Blocks a query sees, its own among them, >= 1.
  idx_t topk = 3;
  std::optional<real> softcap{};
  list_view<real> alibi_slopes{}, sinks{};
  view_field<real, 3> lse{};
  std::optional<real> skip_below{}, skip_share{};
  skipped_tiles* skipped = nullptr;
};

/// Attention over the best blocks; score as in full_softmax.hpp.
template <viewable Q, viewable K, viewable V, viewable O, class Options = topk_blocks_options<element_of<const Q&>>,
          class Score = detail::no_score>
void topk_blocks(const Q& q, const K& k, const V& v, O&& out, Options&& options = {}, Score&& score = {},
                 execution_ref exec = {}) {
  auto call = detail::checked_call<topk_blocks_options>("topk_blocks", q, k, v, out, options, score, exec);
  const auto blocks = detail::check_topk(call, call.options);
  detail::run_topk_blocks(call, blocks);
}

}}  // namespace attn::ATTN_ISA
