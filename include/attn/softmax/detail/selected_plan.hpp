// attn: the plan of sparse attention over blocks of keys that queries name: selected_keys.hpp, whose lists are given,
// and topk_blocks.hpp. The queries of a segment that name a block are a query set, which attends the
// keys of the block together; a task is a segment of one query head, block by block. Rows of a segment are stored
// between one block and the next, so that there is one stage. Keys are packed once for all; where few blocks may be
// named and it is not known which, every query set packs its own.
//
// Names are the part of the plan that says which blocks a query names: beside what a row_plan has
//   shape, lengths                  those of the call
//   end_of(head, i)                 query i sees the keys below
//   block, all, most                keys of a block; blocks there are; blocks that a query names, at most
//   naming_scratch, layout_naming(memory)                      of a thread
//   begin(scratch), named_by(head, i, end, scratch, list)      what query i names below `end`, ascending, in `list`; i
//                                   ascends by 1 after begin()
#pragma once

#include <attn/softmax/detail/selected_lists.hpp>
#include <attn/softmax/detail/sparse_driver.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// One query head of one batch item, and what its names have in tables.
template <class Item>
struct naming_head {
  idx_t batch = 0, head = 0, queries = 0, keys = 0;
  Item tables{};
};

template <class Names>
struct selected_plan : Names {
  static constexpr idx_t few_sums = 32;  // so many are added up without compensation
  static constexpr bool prefetches = false;

  using typename Names::item_scratch;
  using Names::shape, Names::block, Names::all, Names::most, Names::shared;
  using head = naming_head<item_scratch>;
  struct thread_scratch {
    typename Names::naming_scratch names;
    idx_t *of_row, *counts;  // [segment][most], [segment]: what the rows of a segment name
    idx_t *begin, *order;    // [4 all + 5]; rows by block, and of each block by their kind
  };

  idx_t panel;  // width of the panels of packed keys

  thread_scratch layout_scratch(arena& memory) const {
    const idx_t rows = (std::min)(segment_size(shape.queries), shape.queries), named = rows * std::max<idx_t>(1, most);
    return {.names = this->layout_naming(memory), .of_row = memory.allocate<idx_t>(named),
            .counts = memory.allocate<idx_t>(rows), .begin = memory.allocate<idx_t>(4 * all + 5),
            .order = memory.allocate<idx_t>(named)};
  }
  head head_at(idx_t x, const item_scratch& p, idx_t) const {
    const idx_t b = x / shape.heads;
    return {.batch = b, .head = x % shape.heads, .queries = this->lengths.queries(b), .keys = this->lengths.keys(b),
            .tables = p};
  }

  idx_t stages() const { return 1; }
  bool several_sets() const { return most > 1; }
  bool accumulates() const { return most * ceil_div(block, key_block) > few_sums; }
  bool keeps_errors() const { return most > few_sums; }
  idx_t capacity() const { return shared() ? 0 : block + panel; }

  /// Queries of a segment: so many that, on average, those that name a block fill some tiles.
  idx_t segment_size(idx_t queries) const {
    const idx_t wanted = 96 * all / std::max<idx_t>(1, most);
    return round_up(std::clamp<idx_t>(wanted, least_segment, std::max<idx_t>(least_segment, queries / 4)), max_rows);
  }
  idx_t tasks(idx_t, idx_t, idx_t) const { return ceil_div(shape.queries, least_segment); }
  /// A row's names are of a kind: 1 the first, 2 the last, 3 the only one, else 0. Rows of a block and a kind are a
  /// query set, and last those that see no key.
  template <class Visit>
  void sets(const head& h, idx_t, idx_t task, const thread_scratch& s, const Visit& visit) const {
    const idx_t segment = segment_size(h.queries), first = task * segment,
                count = (std::min)(segment, h.queries - first);
    if (count <= 0) return;
    const idx_t no_key = 4 * all + 3;
    const auto kind = [](idx_t n, idx_t of_row) { return idx_t(n == 0) + 2 * idx_t(n + 1 == of_row); };
    this->begin(s.names);
    std::fill_n(s.begin, no_key + 2, idx_t(0));
    for (idx_t r = 0; r < count; ++r) {
      idx_t* const list = s.of_row + r * most;
      const idx_t end = ceil_div(this->end_of(h, first + r), block);
      const idx_t named = s.counts[r] = this->named_by(h, first + r, end, s.names, list);
      for (idx_t n = 0; n < named; ++n) ++s.begin[4 * list[n] + kind(n, named) + 1];
      if (named == 0) ++s.begin[no_key + 1];
    }
    for (idx_t x = 0; x <= no_key; ++x) s.begin[x + 1] += s.begin[x];
    for (idx_t r = 0; r < count; ++r) {
      const idx_t named = s.counts[r], *const list = s.of_row + r * most;
      for (idx_t n = 0; n < named; ++n) s.order[s.begin[4 * list[n] + kind(n, named)]++] = first + r;
      if (named == 0) s.order[s.begin[no_key]++] = first + r;
    }
    for (idx_t x = 0, from = 0; x <= no_key; from = s.begin[x++])  // begin[x] has become the end of x
      if (from < s.begin[x])
        visit(query_set{.number = x == no_key ? -1 : x / 4, .rows = {0, 1, s.order + from}, .count = s.begin[x] - from,
                        .first = x % 2 == 1, .last = x % 4 >= 2});
  }
  /// Keys that a query set packs begin at a panel of all keys, so that sums do not depend on where they are packed.
  template <class Visit>
  void keys(const head& h, const query_set& set, const thread_scratch&, const Visit& visit) const {
    if (set.number < 0) return;
    const idx_t begin = set.number * block, end = (std::min)(begin + block, h.keys);
    const idx_t from = shared() ? 0 : begin / panel * panel, first = shared() ? begin : from;
    visit(seen_keys{.positions = {first, 1, nullptr}, .slot_count = end - first, .in_place = shared()},
          [&, begin, end, from](idx_t row) {
            return key_range{begin - from, (std::min)(end, this->end_of(h, set.rows[row])) - from};
          });
  }

  idx_t parts() const { return parts_for(shape.queries); }
  idx_t part_tasks(idx_t) const { return parts(); }
  template <class Visit>
  void part_sets(const head& h, idx_t, idx_t, idx_t part, const thread_scratch& s, const Visit& visit) const {
    const idx_t own_parts = parts_for(h.queries);
    for (idx_t task = part; part < own_parts && task * segment_size(h.queries) < h.queries; task += own_parts)
      sets(h, 0, task, s, visit);
  }

 private:
  static constexpr idx_t least_segment = 512;

  static idx_t parts_for(idx_t queries) { return parts_of(queries, 4, 2 * least_segment); }
};

/// Names that lists give.
struct listed_names : row_plan {
  static constexpr idx_t least_block = 16;  // keys of a block that are worth packing

  const attention_shape& shape;
  const sequence_lengths& lengths;
  const selected_lists& lists;
  key_limit limit;
  first_positions first_position;
  idx_t block = lists.block, all = lists.names, most = lists.longest();

  using naming_scratch = std::uint64_t*;
  naming_scratch layout_naming(arena& memory) const { return lists.layout(memory); }

  idx_t end_of(const naming_head<item_scratch>& h, idx_t i) const {
    return limit.end(i + (first_position ? first_position.of(h.batch) : h.keys - h.queries), h.keys);
  }
  void begin(std::uint64_t* bits) const { lists.clear(bits); }
  idx_t named_by(const naming_head<item_scratch>& h, idx_t i, idx_t end, std::uint64_t* bits, idx_t* list) const {
    return lists.named_by(h.batch, h.head, i, end, bits, list);
  }
  bool shared() const { return true; }
  void mark_needed(idx_t key_head, bool* needed) const {
    std::fill_n(needed, ceil_div(shape.keys, pack_step), false);
    const idx_t b = key_head / shape.kv_heads, first = key_head % shape.kv_heads * shape.group();
    lists.indices.typed([&](const auto& x) {
      for (idx_t h = first; h < (lists.per_key_head() ? first + 1 : first + shape.group()); ++h)
        for (idx_t i = 0; i < lengths.queries(b); ++i)
          for (idx_t n = 0; n < x.extent(3); ++n) {
            const idx_t name = x(x.extent(0) == 1 ? 0 : b, lists.list_of(h), i, n);
            const idx_t end = (std::min)((name + 1) * block, shape.keys);
            for (idx_t run = name * block / pack_step; name >= 0 && run * pack_step < end; ++run) needed[run] = true;
          }
    });
  }
  double operations(idx_t per_score) const {
    const double seen = static_cast<double>((std::min)(most * block, shape.keys));
    return static_cast<double>(shape.batch * shape.heads * shape.queries) * seen * static_cast<double>(per_score);
  }
};

template <class S, class Score>
selected_plan<listed_names> selected_plan_of(const softmax_call<S, Score>& in, const selected_lists& lists) {
  return {{{}, in.shape, in.lengths, lists, in.limit(), in.first_position}, panel_width<compute_type<S>>};
}

}}}  // namespace attn::ATTN_ISA::detail
