// attn: the plan of attention by a pattern (pattern.hpp), which all operators with such a pattern share: the checks of
// the pattern, where keys are packed (once per key head or per query set), and which query set sees which packed
// slots. Its stages are joined patterns. Knows no element type and no arithmetic.
#pragma once

#include <attn/softmax/detail/sparse_driver.hpp>
#include <attn/softmax/pattern.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

struct pattern_plan : row_plan {
  using head = pattern_shape;

  attention_shape shape;
  sequence_lengths lengths;
  bool causal;
  idx_t panel;                              // width of the panels of packed keys
  std::span<const pattern_ref> patterns{};  // joined patterns in order

  // Found by examine():
  bool packed_once = false;  // keys are packed once for all query sets; else every query set packs its own
  idx_t gathered = 0;        // slots of the query set that gathers most
  idx_t not_in_place = 0;    // those of them that are gathered even if keys are packed once
  idx_t in_ranges = 0;       // keys in ranges of step 1
  double visible_keys = 0;   // visible keys of all queries, at most
  bool shared_by_parts = false;  // most keys are seen by every part of the queries

  /// Head x, counted over all batch items.
  pattern_shape shape_of(idx_t x) const {
    const idx_t b = x / shape.heads;
    return {b, x % shape.heads, lengths.queries(b), lengths.keys(b), causal};
  }

  /// Evaluates the patterns for every query set once. Throws std::invalid_argument for what cannot be attended.
  void examine(const validator& check, execution& exec) {
    bool* const found = exec.shared_scratch([&](arena& memory) { return memory.allocate<bool>(shape.queries); });
    idx_t keys = 0;
    for (idx_t x = 0; x < shape.batch * shape.heads; ++x) {
      if (x % shape.group() == 0) keys += shape_of(x).keys;
      for (const pattern_ref& pattern : patterns) examine(check, pattern, shape_of(x), found);
    }
    packed_once = in_ranges > keys + keys / 2, shared_by_parts = in_ranges > 4 * keys;
    if (packed_once) gathered = not_in_place;
  }

  /// Whether a set is read from the packed keys of its head; else its query set packs it.
  bool in_place(const key_set& set) const { return packed_once && set.contiguous(); }

  /// Number of packed slots before those of the set. A contiguous set begins at a panel of its head, so that sums do
  /// not depend on where it is packed.
  idx_t offset_of(const key_set& set) const {
    return !set.contiguous() ? 0 : packed_once ? set.positions.first : set.positions.first % panel;
  }

  // What the drivers ask (row_plan.hpp) ------------------------------------------------------------------------------

  pattern_shape head_at(idx_t x, const item_scratch&, idx_t) const { return shape_of(x); }
  idx_t stages() const { return std::ssize(patterns); }
  idx_t capacity() const { return gathered; }
  idx_t listed_capacity() const { return not_in_place; }
  double operations(idx_t per_score) const { return visible_keys * static_cast<double>(per_score); }
  bool shared() const { return packed_once; }

  /// A task is a query set.
  idx_t tasks(idx_t stage, idx_t first, idx_t count) const {
    idx_t most = 0;
    for (idx_t x = first; x < first + count; ++x) most = (std::max)(most, of(stage).query_sets(shape_of(x)));
    return most;
  }
  template <class Visit>
  void sets(const pattern_shape& s, idx_t stage, idx_t task, const thread_scratch&, const Visit& visit) const {
    if (task >= of(stage).query_sets(s)) return;
    const position_range queries = of(stage).queries(s, task);
    visit(query_set{.stage = stage, .number = task, .rows = {queries.begin - s.first_position(), queries.step, nullptr},
                    .count = count_of(queries), .first = stage == 0, .last = stage + 1 == stages()});
  }

  /// Consecutive query sets, which share keys, are a part; all parts have about the same work.
  idx_t parts() const { return parts_of(shape.queries, 4, 1024); }
  idx_t part_tasks(idx_t) const { return parts(); }
  bool disjoint(idx_t stage) const { return of(stage).disjoint(); }
  idx_t busy_tasks() const { return parts_of(shape.queries, 4, shared_by_parts ? 2048 : 1024); }
  template <class Visit>
  void part_sets(const pattern_shape& s, idx_t stage, idx_t, idx_t part, const thread_scratch& scratch,
                 const Visit& visit) const {
    constexpr idx_t most = 64;
    const idx_t count = of(stage).query_sets(s), each = ceil_div(count, most);
    set_work work[most], all;
    for (idx_t n = 0; n < count; ++n) work[n / each].add(of(stage), s, n);
    for (const set_work& run : work) all.keys += run.keys, all.scores += run.scores;
    // Where most keys are seen by every part, more parts than that take 2 to 3 % longer on one thread.
    const idx_t own_parts = parts_of(s.queries, 4, all.keys > 4 * s.keys ? 2048 : 1024);
    for (idx_t run = 0, before = 0; run * each < count; before += work[run++].scores)
      if ((2 * before + work[run].scores) * own_parts / (2 * all.scores + 1) == part)  // in whose share its middle lies
        for (idx_t n = run * each; n < (std::min)((run + 1) * each, count); ++n) sets(s, stage, n, scratch, visit);
  }

  template <class Visit>
  void keys(const pattern_shape& s, const query_set& set, const thread_scratch&, const Visit& visit) const {
    of(set.stage).keys(s, set.number, [&](const key_set& keys, const query_range& of_query) {
      const idx_t offset = offset_of(keys);
      seen_keys seen{.positions = keys.positions, .slot_count = keys.count, .in_place = in_place(keys)};
      if (!seen.in_place) seen.positions.first -= offset, seen.slot_count += offset;
      if (!keys.self) seen.excluded.what = excluded_keys::kind::own;
      visit(seen, [&](idx_t row) {
        const key_range slot_range = keys.slots_of(s, set.rows[row] + s.first_position(), of_query);
        return key_range{slot_range.begin + offset, slot_range.end + offset};
      });
    });
  }

  /// Of the next query set as many rows, if they are contiguous.
  template <class S>
  void add_next(const pattern_shape& s, const query_set& set, idx_t row, idx_t count, const head_rows<S>& x,
                line_prefetcher& to) const {
    if (set.number + 1 >= of(set.stage).query_sets(s)) return;
    const position_range queries = of(set.stage).queries(s, set.number + 1);
    const idx_t begin = queries.begin - s.first_position(), end = queries.end - s.first_position();
    if (queries.step == 1) to.add(x.query, begin + row, (std::min)(begin + row + count, end));
  }
  /// Of the next query set: as many of its rows, and as large a part of the keys that it packs.
  template <class S>
  void prefetch_next(const pattern_shape& s, const query_set& set, idx_t row, idx_t count,
                     const head_rows<S>& x) const {
    const idx_t next = set.number + 1, end = row + count;
    if (next >= of(set.stage).query_sets(s)) return;
    const position_range queries = of(set.stage).queries(s, next);
    for (idx_t r = row; r < (std::min)(end, count_of(queries)); ++r)
      prefetch_row(x.query, queries.begin + r * queries.step - s.first_position());
    of(set.stage).keys(s, next, [&](const key_set& keys, const query_range&) {
      if (in_place(keys)) return;
      for (idx_t n = keys.count * row / set.count; n < keys.count * end / set.count; ++n) {
        prefetch_row(x.key, keys.positions[n]);
        prefetch_row(x.value, keys.positions[n]);
      }
    });
  }

  /// Marks, for one key head, the runs of pack_step keys that its query sets read in place.
  void mark_needed(idx_t key_head, bool* needed) const {
    std::fill_n(needed, ceil_div(shape.keys, pack_step), false);
    for (idx_t x = key_head * shape.group(); x < (key_head + 1) * shape.group(); ++x) {
      const pattern_shape s = shape_of(x);
      for (const pattern_ref& pattern : patterns)
        for (idx_t n = 0, sets = pattern.query_sets(s); n < sets; ++n)
          pattern.keys(s, n, [&](const key_set& set, const query_range&) {
            if (!in_place(set)) return;
            const idx_t end = set.positions.first + set.count;
            for (idx_t step = set.positions.first / pack_step; step * pack_step < end; ++step) needed[step] = true;
          });
    }
  }

 private:
  const pattern_ref& of(idx_t stage) const { return patterns[static_cast<std::size_t>(stage)]; }

  /// The work of query sets, roughly: the keys they see, and scores: of a set those of its last query, and what a row
  /// costs beside, for every query.
  struct set_work {
    idx_t keys = 0, scores = 0;

    template <class Pattern>  // compiled for gradients alone
    void add(const Pattern& pattern, const pattern_shape& s, idx_t n) {
      const position_range queries = pattern.queries(s, n);
      const idx_t count = count_of(queries);
      idx_t seen = 64;
      if (count > 0)
        pattern.keys(s, n, [&](const key_set& set, const query_range& of_query) {
          const key_range slot_range = set.slots_of(s, queries.begin + (count - 1) * queries.step, of_query);
          keys += set.count, seen += std::max<idx_t>(0, slot_range.end - slot_range.begin);
        });
      scores += count * seen;
    }
  };

  void examine(const validator& check, const pattern_ref& pattern, const pattern_shape& s, bool* found) {
    std::fill_n(found, s.queries, false);
    idx_t queries_found = 0;
    for (idx_t n = 0, sets = pattern.query_sets(s); n < sets; ++n) {
      const position_range queries = pattern.queries(s, n);
      for (idx_t p = queries.begin; p < queries.end; p += queries.step, ++queries_found)
        if (std::exchange(found[p - s.first_position()], true))
          check.fail("query sets that contain each query once", error_text{"the one at position ", p, " twice"});
      idx_t slot_count = 0, others = 0;
      pattern.keys(s, n, [&](const key_set& set, const query_range& of_query) {
        const bool in_range = set.contiguous();
        if (in_range) in_ranges += set.count;
        slot_count += round_up(set.count + (in_range ? set.positions.first % panel : 0), panel);
        if (!in_range) others += round_up(set.count, panel);
        visible_keys += static_cast<double>(set.count) * static_cast<double>(count_of(queries));
        set.check_list(check);
        if (of_query && queries.begin < queries.end)
          if (const position_range seen = of_query(queries.begin); seen.step != 1)
            check.fail("a query's range of step 1", seen.step);
      });
      gathered = (std::max)(gathered, slot_count);
      not_in_place = (std::max)(not_in_place, others);
    }
    if (queries_found != s.queries)
      check.fail({"query sets that contain each query once: ", s.queries, " in all"}, queries_found);
  }
};

/// The plan of a call. Throws std::invalid_argument for patterns that cannot be attended.
template <class S, class Score>
pattern_plan plan_of(const softmax_call<S, Score>& call, std::span<const pattern_ref> patterns) {
  pattern_plan plan{{}, call.shape, call.lengths, call.causal, panel_width<compute_type<S>>, patterns};
  plan.examine(call.check, call.exec);
  return plan;
}

template <class S, class Score>
void run_pattern_softmax(const softmax_call<S, Score>& call, std::span<const pattern_ref> patterns) {
  run_plan(call, plan_of(call, patterns));
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN(S) void run_pattern_softmax(const softmax_call<S, no_score>&, std::span<const pattern_ref>)
#include <attn/core/detail/compiled.hpp>
