// attn: the names of topk_blocks.hpp, for the plan of blocks that queries name (selected_plan.hpp): the keys of every
// block are added up, unless a cache has the sums; a query names the blocks it chooses (topk_choice.hpp), and its own.
#pragma once

#include <attn/softmax/detail/selected_plan.hpp>
#include <attn/softmax/detail/topk_choice.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <class S>
struct topk_names : row_plan {
  using T = compute_type<S>;

  const attention_shape& shape;
  const sequence_lengths& lengths;
  const topk_shape& blocks;
  tensor_view<const S> q, k;
  const T* sums = nullptr;  // those of a cache, sums_stride from key head to key head, or null
  idx_t sums_stride = 0;
  idx_t cache_block = 0, topk = 0;  // those of a cache, as they were given
  idx_t block = blocks.block, all = shape.keys > 0 ? blocks.blocks + 1 : 0, most = blocks.rounds + 1;
  bool packs_all = shape.queries * most >= all;
  bool shared() const { return packs_all; }
  /// Whether another plan attends an item of a cache, so that it names nothing here. Nothing but the item itself
  /// decides, for the bits of its result depend on it.
  bool streamed(idx_t b) const {
    return sums && topk_shape(lengths.keys(b), cache_block, topk).streams(lengths.queries(b));
  }

  /// The sums of one key head of one batch item.
  using item_scratch = block_sums<T>;
  item_scratch layout(arena& memory, idx_t) const {
    return {memory.allocate<T>(sums ? 0 : block_sums<T>::size(blocks.blocks, shape.dim)), shape.dim};
  }
  struct naming_scratch {
    block_chooser<T> chooser;
    idx_t* tile;  // the queries [tile[0], tile[1]) have chosen
  };
  naming_scratch layout_naming(arena& memory) const {
    return {block_chooser<T>::layout(memory, shape.dim, blocks.rounds), memory.allocate<idx_t>(2)};
  }

  template <class ForEach>
  void prepare(idx_t first, idx_t, const ForEach& for_each) const {
    if (blocks.rounds == 0 || first > 0 || sums) return;
    constexpr idx_t some = std::min<idx_t>(4, panel_width<T>);  // blocks of a task
    for_each(round_up(blocks.blocks, panel_width<T>) / some, [&](idx_t x, const item_scratch& of, idx_t step, auto&&) {
      const idx_t b = x / shape.heads, begin = step * some, past = begin + some,
                  end = (std::max)(begin, (std::min)({past, blocks.blocks, lengths.keys(b) / blocks.block}));
      of.fill(head_of(k, b, x % shape.heads / shape.group()), blocks.block, begin, end, past);
    });
  }

  idx_t end_of(const naming_head<item_scratch>& h, idx_t i) const {
    return std::clamp<idx_t>(i + h.keys - h.queries + 1, 0, h.keys);
  }
  void begin(const naming_scratch& s) const { s.tile[0] = s.tile[1] = 0; }
  idx_t named_by(const naming_head<item_scratch>& h, idx_t i, idx_t end, const naming_scratch& s, idx_t* list) const {
    if (end == 0 || streamed(h.batch)) return 0;  // before the first key, or elsewhere
    const idx_t position = i + h.keys - h.queries, count = blocks.choices(position);
    if (count > 0 && i >= s.tile[1]) {
      s.tile[0] = i, s.tile[1] = std::min<idx_t>(i + tile_rows, h.queries);
      const idx_t key_head = h.batch * shape.kv_heads + h.head / shape.group();
      const block_sums<const T> of{sums ? sums + key_head * sums_stride : h.tables.data, shape.dim};
      s.chooser.choose(head_of(q, h.batch, h.head), i, s.tile[1] - i, position, blocks, of);
    }
    if (count > 0) std::copy_n(s.chooser.chosen + (i - s.tile[0]) * blocks.rounds, count, list);
    list[count] = blocks.block_of(position);
    return count + 1;
  }
  void mark_needed(idx_t, bool* needed) const { std::fill_n(needed, ceil_div(shape.keys, pack_step), true); }
  double operations(idx_t per_score) const {
    const double seen = static_cast<double>((std::min)(most * block, shape.keys));
    return static_cast<double>(shape.batch * shape.heads) * static_cast<double>(shape.queries) *
           (seen * static_cast<double>(per_score) + static_cast<double>(blocks.blocks * shape.dim));
  }
};

template <class S, class Score>
selected_plan<topk_names<S>> topk_plan_of(const softmax_call<S, Score>& in, const topk_shape& blocks,
                                          const compute_type<S>* sums = nullptr, idx_t sums_stride = 0,
                                          idx_t cache_block = 0, idx_t topk = 0) {
  return {{{}, in.shape, in.lengths, blocks, in.q, in.k, sums, sums_stride, cache_block, topk},
          panel_width<compute_type<S>>};
}

/// The checks of the options that only topk_blocks has.
template <class Call, class Options>
topk_shape check_topk(Call& call, const Options& options) {
  call.check.at_least("block", 1, options.block);
  call.check.at_least("topk", 1, options.topk);
  call.causal = true;
  return topk_shape(call.shape.keys, options.block, options.topk);
}

template <class S, class Score>
void run_topk_blocks(const softmax_call<S, Score>& call, const topk_shape& blocks) {
  run_plan(call, topk_plan_of(call, blocks));
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN(S) void run_topk_blocks(const softmax_call<S, no_score>&, const topk_shape&)
#include <attn/core/detail/compiled.hpp>
