// attn: softmax attention over the keys that a list names, one list for every query.
//
//   out_i = softmax attention (full_softmax.hpp) over the keys that the list of query i names
//       DeepSeek Sparse Attention (DeepSeek-AI 2025, V3.2), whose lists lightning_indexer.hpp makes; with blocks the
//       selected branch of NSA (Yuan et al. 2025)
//
//   attn::selected_keys(q, k, v, out, indices, {.causal = true});                  // indices: std::int32_t or int64_t
//   attn::selected_keys(q, k, v, out, blocks, {.causal = true, .block = 64, .lse = lse}, threads);
//
// With span keys stand for several tokens, as in full_softmax.hpp (DeepSeek-V4).
//
// indices [B or 1, H or Hkv or 1, Lq, n]: keys, in any order; -1 is none. With block > 1 they name blocks: b is the
// keys b block ... (b + 1) block - 1, of which there may be fewer in the last one. What is named twice counts once.
// Keys beyond the true length, and with causal those after the query's position, are left out. Lists for key heads
// serve all their query heads, and their keys are read once for these. The order of a list changes no bit.
//
// Shapes   as full_softmax: query i is at position i + Lk - Lq, with true lengths, or i + first_position.
// Cost     2 B H Lq n block (D + Dv) operations. Scratch: per thread the sorted names of a query; with blocks of 16
//          keys and more, which are attended by all queries together that name them, the packed keys and values of
//          one key head (or of as many as fill the threads), about Lk (D + Dv) numbers, and where rows of out cannot
//          hold unfinished sums (16-bit types, strides, dims that are no multiple of a vector) Lq Dv for every head in
//          progress.
// Values   `out` is finite where that of full_softmax is.
// Throws   std::invalid_argument for shapes or options that do not fit, for names beyond the arrays or below -1 (rows
//          of padding may hold anything), before anything is written.
//
// A row that sees no key is 0, its lse the sink or -infinity. The lists have no gradient (selected_keys_backward.hpp).
// Token by token: selected_keys_step.hpp.
#pragma once

#include <attn/softmax/detail/selected_keys_run.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Options of selected_keys for elements of type S: those of pattern_softmax, and
template <class S>
struct selected_keys_options {
  using real = compute_type<S>;
  static constexpr unsigned shared = detail::fields::causal | detail::fields::lengths | detail::fields::first_position |
                                     detail::fields::span | detail::fields::masks | detail::fields::of_softmax |
                                     detail::fields::dropout | detail::fields::skip;

  std::optional<real> scale{};
  bool causal = false;
  list_view<idx_t> lengths{}, query_lengths{}, key_lengths{};
  first_positions first_position{};
  /// Keys of a name, and tokens of a key, >= 1; one of the two.
  idx_t block = 1, span = 1;
  mask_view mask{};
  key_mask_view key_mask{};
  std::optional<real> softcap{};
  list_view<real> alibi_slopes{}, sinks{};
  dropout_options dropout{};
  view_field<real, 3> lse{};
  std::optional<real> skip_below{}, skip_share{};
  skipped_tiles* skipped = nullptr;
};

/// Attention over the keys that lists name; score as in full_softmax.hpp.
template <viewable Q, viewable K, viewable V, viewable O, class Options = selected_keys_options<element_of<const Q&>>,
          class Score = detail::no_score>
void selected_keys(const Q& q, const K& k, const V& v, O&& out, const index_view& indices, Options&& options = {},
                   Score&& score = {}, execution_ref exec = {}) {
  auto call = detail::checked_call<selected_keys_options>("selected_keys", q, k, v, out, options, score, exec);
  detail::check_block_of_span(call.views, call.options);
  const auto lists = detail::check_lists(call.views, call.shape, call.lengths, indices, call.options.block);
  detail::run_selected_keys(call, lists);
}

}}  // namespace attn::ATTN_ISA
