// attn: what a call by a pattern attends: the checks of the pattern, where keys are packed (once per head or per query
// set), and which query set sees which packed slots. Knows no element type and no arithmetic.
#pragma once

#include <attn/core/execution.hpp>
#include <attn/softmax/pattern.hpp>

namespace attn::inline ATTN_ISA::detail {

struct pattern_plan {
  static constexpr idx_t pack_step = 128;  // keys packed at a time, if any of them is seen

  attention_shape shape;
  sequence_lengths lengths;
  bool causal;
  idx_t panel;                              // width of the panels of packed keys
  std::span<const pattern_ref> patterns{};  // joined patterns in order

  // Found by examine():
  bool shared = false;     // keys are packed once for all query sets; else every query set packs its own
  idx_t gathered = 0;      // slots of the query set that gathers most
  idx_t not_in_place = 0;  // those of them that are gathered even if keys are shared
  idx_t contiguous = 0;    // keys in ranges of step 1
  double visible_keys = 0;        // visible keys of all queries, at most

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
    shared = contiguous > keys + keys / 2;
    if (shared) gathered = not_in_place;
  }

  /// Whether a set is read from the packed keys of its head; else its query set packs it.
  bool in_place(const key_set& set) const { return shared && set.contiguous(); }

  /// Number of packed slots before those of the set. A contiguous set begins at a panel of its head, so that sums do
  /// not depend on where it is packed.
  idx_t lead_of(const key_set& set) const {
    return !set.contiguous() ? 0 : shared ? set.positions.first : set.positions.first % panel;
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
  void examine(const validator& check, const pattern_ref& pattern, const pattern_shape& s, bool* found) {
    std::fill_n(found, s.queries, false);
    idx_t queries_found = 0;
    for (idx_t n = 0, sets = pattern.query_sets(s); n < sets; ++n) {
      const position_range queries = pattern.queries(s, n);
      for (idx_t p = queries.begin; p < queries.end; p += queries.step, ++queries_found)
        if (std::exchange(found[p - s.first_position()], true))
          check.fail("query sets that contain each query once", text({"the one at position ", p, " twice"}));
      idx_t slots = 0, others = 0;
      pattern.keys(s, n, [&](const key_set& set, const query_range& of_query) {
        const bool in_range = set.contiguous();
        if (in_range) contiguous += set.count;
        slots += round_up(set.count + (in_range ? set.positions.first % panel : 0), panel);
        if (!in_range) others += round_up(set.count, panel);
        visible_keys += static_cast<double>(set.count) * static_cast<double>(count_of(queries));
        set.check_list(check);
        if (of_query && queries.begin < queries.end)
          if (const position_range seen = of_query(queries.begin); seen.step != 1)
            check.fail("a query's range of step 1", seen.step);
      });
      gathered = std::max(gathered, slots);
      not_in_place = std::max(not_in_place, others);
    }
    if (queries_found != s.queries)
      check.fail({"query sets that contain each query once: ", s.queries, " in all"}, queries_found);
  }
};

}  // namespace attn::inline ATTN_ISA::detail
