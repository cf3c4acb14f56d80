// attn: the plan of topk_blocks.hpp: the keys of every block are added up, unless a cache has the sums; queries choose
// their blocks, and are sorted by them, round by round (topk_choice.hpp). A round is a stage, that of the own blocks
// the last one; the queries of a task that attend one block are a query set.
#pragma once

#include <attn/softmax/detail/sparse_driver.hpp>
#include <attn/softmax/detail/topk_choice.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <class S>
struct topk_plan : row_plan {
  static constexpr idx_t segment = 512;  // entries of a round that are a task
  static constexpr idx_t few_sums = 32;  // so many are added up without compensation
  static constexpr bool at_panels = false, prefetches = false;

  using T = compute_type<S>;
  using head = topk_head;

  const attention_shape& shape;
  const sequence_lengths& lengths;
  const topk_shape& blocks;
  tensor_view<const S> q, k;
  const T* sums = nullptr;  // those of a cache, sums_stride from key head to key head, or null
  idx_t sums_stride = 0;

  /// Of one key head of one batch item.
  struct item_scratch {
    block_sums<T> sums;
    idx_t *chosen, *order;  // of every query head in progress
  };
  item_scratch layout(arena& memory, idx_t heads) const {
    return {.sums = {memory.allocate<T>(sums ? 0 : block_sums<T>::size(blocks.blocks, shape.dim)), shape.dim},
            .chosen = memory.allocate<idx_t>(heads * topk_head::size(shape.queries, blocks)),
            .order = memory.allocate<idx_t>(heads * topk_head::size(shape.queries, blocks))};
  }
  struct thread_scratch {
    block_chooser<T> chooser;
    idx_t* next;
  };
  thread_scratch layout_scratch(arena& memory) const {
    return {.chooser = block_chooser<T>::layout(memory, shape.dim, blocks.rounds),
            .next = memory.allocate<idx_t>(blocks.blocks + 1)};
  }
  topk_head head_of(idx_t x, const item_scratch& p, idx_t slot) const {
    const idx_t b = x / shape.heads, size = topk_head::size(shape.queries, blocks);
    return {.batch = b, .head = x % shape.heads, .queries = lengths.queries(b),
            .shift = lengths.keys(b) - lengths.queries(b), .blocks = blocks, .stride = shape.queries,
            .chosen = p.chosen + slot * size, .order = p.order + slot * size};
  }

  void prepare(idx_t first, idx_t count, const for_each_step<item_scratch, thread_scratch>& for_each) const {
    if (blocks.rounds == 0) return;
    if (first == 0 && !sums)
      for_each(ceil_div(blocks.blocks, panel_width<T>), [&](idx_t x, const item_scratch& p, idx_t step, auto&&) {
        const idx_t b = x / shape.heads, begin = step * panel_width<T>,
                    end = std::min({begin + panel_width<T>, blocks.blocks, lengths.keys(b) / blocks.block});
        if (begin < end) p.sums.fill(detail::head_of(k, b, x % shape.heads / shape.group()), blocks.block, begin, end);
      });
    for_each(count * ceil_div(shape.queries, max_rows),
             [&](idx_t x, const item_scratch& p, idx_t step, const thread_scratch& s) {
               const topk_head h = head_of(x + first + step % count, p, step % count);
               const block_sums<const T> of{sums ? sums + x / shape.group() * sums_stride : p.sums.data, shape.dim};
               const idx_t begin = std::max(step / count * max_rows, h.first_of(0)),
                           end = std::min(step / count * max_rows + max_rows, h.queries);
               for (idx_t i = begin; i < end; i += tile_rows)
                 choose_tile(h, i, std::min<idx_t>(tile_rows, end - i), of, s.chooser);
             });
    for_each(count * blocks.rounds, [&](idx_t x, const item_scratch& p, idx_t step, const thread_scratch& s) {
      head_of(x + first + step % count, p, step % count).sort(step / count, s.next);
    });
  }

  idx_t stages() const { return blocks.rounds + 1; }
  bool sums_apart() const { return blocks.rounds * ceil_div(blocks.block, key_block) > few_sums; }
  bool keeps_errors() const { return blocks.rounds > few_sums; }
  idx_t capacity() const { return blocks.block; }
  idx_t tasks(idx_t, idx_t, idx_t) const { return ceil_div(shape.queries, segment); }
  template <class Visit>
  void sets(const topk_head& h, idx_t round, idx_t task, const thread_scratch&, const Visit& visit) const {
    const idx_t begin = task * segment;
    visit_runs(h, round, begin, std::min(begin + segment, h.count_of(round)), visit);
  }
  idx_t parts() const { return parts_of(shape.queries, 4); }
  idx_t part_tasks(idx_t) const { return parts(); }
  template <class Visit>
  void part_sets(const topk_head& h, idx_t round, idx_t, idx_t part, const thread_scratch&, const Visit& visit) const {
    const idx_t own_parts = parts_of(h.queries, 4), count = h.count_of(round);
    if (part < own_parts) visit_runs(h, round, count * part / own_parts, count * (part + 1) / own_parts, visit);
  }
  template <class Visit>
  void keys(const topk_head& h, const query_set& set, const thread_scratch&, const Visit& visit) const {
    const idx_t slots = h.seen(set.stage, set.number + set.count - 1).end;
    if (slots == 0) return;  // before the first key
    visit(seen_keys{.positions = {h.block(set.stage, set.number) * blocks.block, 1, nullptr}, .slots = slots},
          [&](idx_t row) { return h.seen(set.stage, set.number + row); });
  }

  double operations(idx_t per_score) const {
    const double seen = static_cast<double>(std::min((blocks.rounds + 1) * blocks.block, shape.keys));
    return static_cast<double>(shape.batch * shape.heads) * static_cast<double>(shape.queries) *
           (seen * static_cast<double>(per_score) + static_cast<double>(blocks.blocks * shape.dim));
  }
  idx_t numbers(const attention_shape& s) const {
    return s.queries * s.group() * (4 * blocks.rounds + s.dim + s.dim_v);
  }

 private:
  void choose_tile(const topk_head& h, idx_t i, idx_t count, const block_sums<const T>& of,
                   const block_chooser<T>& chooser) const {
    chooser.choose(detail::head_of(q, h.batch, h.head), i, count, i + h.shift, blocks, of);
    for (idx_t m = 0; m < count; ++m)
      for (idx_t r = 0; r < blocks.choices(i + m + h.shift); ++r)
        h.chosen[r * h.stride + i + m] = chooser.chosen[m * blocks.rounds + r];
  }
  /// The query sets of entries [begin, end) of a round; a set's number is its first entry.
  template <class Visit>
  void visit_runs(const topk_head& h, idx_t round, idx_t begin, idx_t end, const Visit& visit) const {
    const bool last = round == blocks.rounds;
    h.for_each_run(round, begin, end, [&](idx_t n, idx_t count) {
      visit(query_set{.stage = round, .number = n, .rows = h.rows(round, n), .count = count,
                      .first = last ? blocks.choices(n + h.shift) == 0 : round == 0, .last = last});
    });
  }
};

template <class S, class Score>
topk_plan<S> topk_plan_of(const softmax_call<S, Score>& in, const topk_shape& blocks,
                          const compute_type<S>* sums = nullptr, idx_t sums_stride = 0) {
  return {{}, in.shape, in.lengths, blocks, in.q, in.k, sums, sums_stride};
}

}}}  // namespace attn::ATTN_ISA::detail
