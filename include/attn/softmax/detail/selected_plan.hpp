// attn: the plan of selected_keys.hpp for blocks of keys. The queries of a segment that name a block are a query set,
// which attends the keys of the block together; a task is a segment of one query head, block by block. Keys are packed
// once for all. Rows of a segment are stored between one block and the next, so that there is one stage.
#pragma once

#include <attn/softmax/detail/selected_lists.hpp>
#include <attn/softmax/detail/sparse_driver.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

struct selected_plan : row_plan {
  static constexpr idx_t least_block = 16;  // keys of a block that are worth packing
  static constexpr idx_t few_sums = 32;     // so many are added up without compensation
  static constexpr bool prefetches = false;

  struct head {
    idx_t batch = 0, head = 0, queries = 0, keys = 0;
  };

  const attention_shape& shape;
  const sequence_lengths& lengths;
  const selected_lists& lists;
  bool causal;

  head head_of(idx_t x, const item_scratch&, idx_t) const {
    const idx_t b = x / shape.heads;
    return {.batch = b, .head = x % shape.heads, .queries = lengths.queries(b), .keys = lengths.keys(b)};
  }

  /// Queries of a segment: of a block's keys a segment sees as many queries, on average, as fill some tiles.
  idx_t segment_of(idx_t queries) const {
    const idx_t wanted = 96 * lists.names / std::max<idx_t>(1, lists.longest());
    return round_up(std::clamp<idx_t>(wanted, 512, std::max<idx_t>(512, queries / 4)), max_rows);
  }
  struct thread_scratch {
    std::uint64_t* bits;
    idx_t *of_row, *counts;          // [segment][longest], [segment]: what the rows of a segment name
    idx_t *begin, *order;            // [4 names + 5]; rows by block, and of each block by their kind
  };
  idx_t longest_segment() const { return std::min(segment_of(shape.queries), shape.queries); }
  thread_scratch layout_scratch(arena& memory) const {
    const idx_t rows = longest_segment();
    return {.bits = lists.layout(memory), .of_row = memory.allocate<idx_t>(rows * lists.longest()),
            .counts = memory.allocate<idx_t>(rows), .begin = memory.allocate<idx_t>(4 * lists.names + 5),
            .order = memory.allocate<idx_t>(rows * std::max<idx_t>(1, lists.longest()))};
  }

  idx_t stages() const { return 1; }
  bool several_sets() const { return lists.longest() > 1; }
  bool sums_apart() const { return lists.longest() * ceil_div(lists.block, key_block) > few_sums; }
  bool keeps_errors() const { return lists.longest() > few_sums; }
  idx_t capacity() const { return 0; }
  idx_t tasks(idx_t, idx_t, idx_t) const { return ceil_div(shape.queries, 512); }
  bool shared() const { return true; }

  /// A row's names are of a kind: 1 the first, 2 the last, 3 the only one, else 0. Rows of a block and a kind are a
  /// query set, and last those that see no key.
  template <class Visit>
  void sets(const head& h, idx_t, idx_t task, const thread_scratch& s, const Visit& visit) const {
    const idx_t segment = segment_of(h.queries), first = task * segment, count = std::min(segment, h.queries - first);
    if (count <= 0) return;
    const idx_t most = lists.longest(), blind = 4 * lists.names + 3;
    const auto kind = [](idx_t n, idx_t names) { return idx_t(n == 0) + 2 * idx_t(n + 1 == names); };
    lists.clear(s.bits);
    std::fill_n(s.begin, blind + 2, idx_t(0));
    for (idx_t r = 0; r < count; ++r) {
      idx_t* const list = s.of_row + r * most;
      const idx_t names = s.counts[r] = lists.named_by(h.batch, h.head, first + r,
                                                       ceil_div(end_of(h, first + r), lists.block), s.bits, list);
      for (idx_t n = 0; n < names; ++n) ++s.begin[4 * list[n] + kind(n, names) + 1];
      if (names == 0) ++s.begin[blind + 1];
    }
    for (idx_t x = 0; x <= blind; ++x) s.begin[x + 1] += s.begin[x];
    for (idx_t r = 0; r < count; ++r) {
      const idx_t names = s.counts[r], *const list = s.of_row + r * most;
      for (idx_t n = 0; n < names; ++n) s.order[s.begin[4 * list[n] + kind(n, names)]++] = first + r;
      if (names == 0) s.order[s.begin[blind]++] = first + r;
    }
    for (idx_t x = 0, from = 0; x <= blind; from = s.begin[x++])  // begin[x] has become the end of x
      if (from < s.begin[x])
        visit(query_set{.number = x == blind ? -1 : x / 4, .rows = {0, 1, s.order + from}, .count = s.begin[x] - from,
                        .first = x % 2 == 1, .last = x % 4 >= 2});
  }
  template <class Visit>
  void keys(const head& h, const query_set& set, const thread_scratch&, const Visit& visit) const {
    if (set.number < 0) return;
    const idx_t begin = set.number * lists.block, end = std::min(begin + lists.block, h.keys);
    visit(seen_keys{.positions = {begin, 1, nullptr}, .slots = end - begin, .in_place = true},
          [&, begin, end](idx_t row) { return key_range{begin, std::min(end, end_of(h, set.rows[row]))}; });
  }
  /// Marks the runs of pack_step keys that any list names.
  void mark_needed(idx_t key_head, bool* needed) const {
    std::fill_n(needed, ceil_div(shape.keys, pack_step), false);
    const idx_t b = key_head / shape.kv_heads, kv = key_head % shape.kv_heads;
    lists.indices.typed([&](const auto& x) {
      for (idx_t h = kv * shape.group(); h < (kv + 1) * shape.group(); ++h) {
        for (idx_t i = 0; i < lengths.queries(b); ++i)
          for (idx_t n = 0; n < x.extent(3); ++n) {
            const idx_t name = x(x.extent(0) == 1 ? 0 : b, lists.list_of(h), i, n);
            const idx_t end = std::min((name + 1) * lists.block, shape.keys);
            for (idx_t step = name * lists.block / pack_step; name >= 0 && step * pack_step < end; ++step)
              needed[step] = true;
          }
        if (lists.per_key_head()) break;
      }
    });
  }

  idx_t parts() const { return parts_of(shape.queries, 4); }
  idx_t part_tasks(idx_t) const { return parts(); }
  template <class Visit>
  void part_sets(const head& h, idx_t, idx_t, idx_t part, const thread_scratch& s, const Visit& visit) const {
    const idx_t own_parts = parts_of(h.queries, 4);
    for (idx_t task = part; part < own_parts && task * segment_of(h.queries) < h.queries; task += own_parts)
      sets(h, 0, task, s, visit);
  }

  double operations(idx_t per_score) const {
    const double seen = static_cast<double>(std::min(lists.longest() * lists.block, shape.keys));
    return static_cast<double>(shape.batch * shape.heads * shape.queries) * seen * static_cast<double>(per_score);
  }
  static idx_t numbers(const attention_shape& s) { return s.keys * (s.dim + s.dim_v); }

 private:
  /// The keys that query i may see are those below.
  idx_t end_of(const head& h, idx_t i) const {
    return causal ? std::clamp<idx_t>(i + h.keys - h.queries + 1, 0, h.keys) : h.keys;
  }
};

template <class S, class Score>
selected_plan selected_plan_of(const softmax_call<S, Score>& in, const selected_lists& lists) {
  return {{}, in.shape, in.lengths, lists, in.causal};
}

}}}  // namespace attn::ATTN_ISA::detail
