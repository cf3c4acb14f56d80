// attn: what a plan says of sparse attention: which rows of q see which keys. One driver does the rest, forward
// (sparse_driver.hpp) and backward (sparse_backward.hpp): packing, waves of heads, rows in blocks, the states of rows
// between stages, sums of gradients in parts and their scattering.
//
//   pattern_softmax_run.hpp  query sets of patterns (pattern.hpp)
//   selected_plan.hpp        blocks of keys that queries name, by lists or by choice (topk_blocks_run.hpp): the queries
//                            of a segment that name a block attend it together
//   neighborhood_run.hpp     strips of a grid
//   lsh_run.hpp              chunks of tokens sorted by their hashes, in rounds; the keys are made from the queries
//
// A plan works in stages: every query is in one query set of each stage at most, and is stored between two of them; or
// in several of one task (several_sets()), one after the other. The first and the last that has a query say so
// (query_set::first, last). Plans derive from row_plan and replace what is different; beside that they have
//
//   head                          one query head of one batch item: .batch, .head, and what the plan needs to know
//   head_at(x, memory, slot)      the head number x, counted over all batch items; its tables are the slot-th in memory
//   tasks(stage, first, count)    tasks of a stage for each of these heads, at most; early ones are the longest
//   sets(head, stage, task, scratch, visit)          visit(query_set) for the query sets of a task
//   keys(head, query_set, scratch, visit)            visit(seen_keys, seen) for the sets of keys it sees, none of them
//                                                    empty; seen(row) are the slots that row of the query set sees
//   capacity()                    slots of the keys that a query set packs itself, at most
//   operations(per_score)          of all heads: per_score for every query and key
#pragma once

#include <attn/core/detail/attention_shape.hpp>
#include <attn/core/detail/function_ref.hpp>
#include <attn/core/detail/sums_in_parts.hpp>
#include <attn/softmax/detail/score_terms.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Rows of one query head that see the same sets of keys.
struct query_set {
  idx_t stage = 0, number = 0;  // number: the plan's own
  index_map rows{};             // of q
  idx_t count = 0;
  idx_t unit = count;              // rows of two units of so many are not attended together
  bool first = true, last = true;  // whether no earlier stage has these rows, and no later one
};

/// A set of keys as its query set sees it. Slot n is key positions[n].
struct seen_keys {
  index_map positions{};
  idx_t slot_count = 0;
  bool in_place = false;  // read from the keys that are packed once for all query sets; `positions` are their slots
  excluded_keys excluded{};

  bool contiguous() const { return !positions.list && positions.step == 1; }
};

/// for_each(steps, body(number of the first head of an item, its tables, step, scratch)) runs the tasks of a wave. What
/// is done for every query set is inlined instead: references to it cost 2 % of the time.
template <class Item, class Thread>
using for_each_step = function_ref<void(idx_t, const function_ref<void(idx_t, const Item&, idx_t, const Thread&)>&)>;

/// The rows of one query head and its key head.
template <class S, class R = S>
struct head_rows {
  matrix_view<const S> query, key, value;
  matrix_view<R> result{};
};

/// What most plans answer alike.
struct row_plan {
  static constexpr idx_t pack_step = 128;          // keys of a task that packs or stores keys
  static constexpr bool keys_are_queries = false;  // every query head has keys of its own, made from its queries

  struct item_scratch {};  // tables of one key head or head in progress, which its threads share
  struct thread_scratch {};
  template <class... X>
  item_scratch layout(X&&...) const {
    return {};
  }
  thread_scratch layout_scratch(arena&) const { return {}; }

  /// prepare(first, count, for_each_step): the tables of query heads [first, first + count) of every item.
  template <class... X>
  void prepare(X&&...) const {}
  /// Per key head, or head: what should stay in the caches.
  static idx_t numbers(const attention_shape& s) { return s.keys * (s.dim + s.dim_v); }
  /// Whether a row may be in several query sets of a task.
  bool several_sets() const { return false; }
  /// Whether what a stage adds to a row is summed up before it meets the sums of earlier stages, as it must be where
  /// many tiles add up; and whether the sums between stages keep what they lose.
  bool accumulates() const { return false; }
  bool keeps_errors() const { return false; }
  /// The keys of a head, as a matrix whose rows are read one panel at a time.
  template <class Head, class Rows, class Scratch>
  const Rows& key_rows(const Head&, const Rows& rows, const Scratch&) const {
    return rows;
  }
  /// Whether rows of results and what comes next are worth prefetching: where few rows see a set of keys, they are not.
  static constexpr bool prefetches = true;
  /// Prefetches what is needed after `count` rows of a query set from `row` on.
  template <class... X>
  void prefetch_next(X&&...) const {}
  /// Adds what products are to fetch meanwhile.
  template <class... X>
  void add_next(X&&...) const {}
  /// The states of rows that have seen all their keys.
  template <class... X>
  void complete(X&&...) const {}

  /// Whether keys are packed once for all query sets of a key head: if so, mark_needed(key_head, needed) marks the runs
  /// of pack_step keys that are read in place.
  bool shared() const { return false; }
  /// The key of each of their slots.
  index_map shared_positions() const { return {}; }
  void mark_needed(idx_t, bool*) const {}

  // Backward, part_sets(head, stage, phase, task, scratch, visit) visits the query sets of a task. The phases of a
  // stage follow one another; each has part_tasks(phase) tasks, which run at the same time. There are parts() sums of
  // dK and dV: one for every task, or one for all, where no two tasks of a phase see the same key. Nothing of it
  // depends on the number of threads.
  idx_t phases() const { return 1; }
  /// Whether no two query sets of a stage see the same key: then its tasks share the first of the sums.
  bool disjoint(idx_t) const { return false; }
  // of those of a head that have work, or more
  idx_t busy_tasks() const { return (std::numeric_limits<idx_t>::max)(); }
  /// Slots of the keys that a query set packs itself and that are not contiguous, at most.
  idx_t listed_capacity() const { return 0; }
  /// Whether contiguous keys are packed as they lie in the panels of all keys.
  static constexpr bool at_panels = true;
};

}}}  // namespace attn::ATTN_ISA::detail
