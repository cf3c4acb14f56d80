// attn: attention by a pattern, what block, strided, bigbird and pattern_softmax share. attend_by(call, pattern) makes the
// plan of the pattern (pattern_plan.hpp), then pattern_driver takes waves of key heads:
//     1. keys and values that several query sets see are packed once, pack_step at a time
//     2. for every query set: pack its other keys; for every block of its rows, for every key set: attend
//     3. with joined patterns, the states of rows are stored between one pattern and the next
#pragma once

#include <attn/core/detail/prefetch.hpp>
#include <attn/core/detail/waves.hpp>
#include <attn/softmax/detail/pattern_plan.hpp>
#include <attn/softmax/detail/row_states.hpp>
#include <attn/softmax/detail/softmax_call.hpp>

namespace attn::inline ATTN_ISA::detail {

template <class S, class Score, class P = product_type<S>>
struct pattern_driver {
  using T = compute_type<S>;

  const softmax_call<S, Score>& in;
  const pattern_plan& plan;
  const attention_shape& shape = in.shape;

  matrix_view<const S> query(const pattern_shape& s) const { return in.query(s.batch, s.head); }
  matrix_view<const S> key(const pattern_shape& s) const { return in.key(s.batch, s.head); }
  matrix_view<const S> value(const pattern_shape& s) const { return in.value(s.batch, s.head); }
  matrix_view<S> result(const pattern_shape& s) const { return in.result(s.batch, s.head); }

  /// Memory that all threads share for one key head of one batch item.
  struct head_scratch {
    packed_keys<P> keys;    // where keys are packed once for all query sets
    row_states<T>* states;  // per query head, for joined patterns
    bool* needed;           // per pack_step keys
  };
  head_scratch layout(arena& memory) const {
    head_scratch shared{};
    if (plan.shared) {
      shared.keys = packed_keys<P>::layout(memory, shape.keys, shape.dim, shape.dim_v);
      shared.needed = memory.allocate<bool>(ceil_div(shape.keys, plan.pack_step));
    }
    if (plan.patterns.size() > 1)
      shared.states = memory.allocate_list(shape.group(), [&](arena& m) { return row_states<T>::layout(m, in.out); });
    return shared;
  }

  /// Scratch of one thread: a block of rows, and the keys a query set gathers.
  struct thread_scratch {
    row_block<P> block;
    packed_keys<P> gathered;
  };
  thread_scratch scratch(int worker) const {
    return in.exec.scratch(worker, [&](arena& memory) {
      return thread_scratch{row_block<P>::layout(memory, shape.dim, shape.dim_v),
                            packed_keys<P>::layout(memory, plan.gathered, shape.dim, shape.dim_v)};
    });
  }

  /// One query set of a pattern, with the memory its threads share.
  struct query_set {
    const pattern_ref& pattern;
    bool first, last;  // of joined patterns
    pattern_shape shape;
    idx_t number;
    packed_keys<P> shared;
    row_states<T> states;
  };

  /// A set of keys as the pattern gives it, and where it lies packed: in slots from `lead` on.
  struct packed_set {
    const key_set& given;
    idx_t lead;
    packed_keys<P> keys;
    idx_t gathered = 0;  // slots the query set packs itself; none: they are read in place
  };

  /// visit(packed_set, query_range) for every key set.
  template <class Visit>
  void for_each_key_set(const query_set& set, const packed_keys<P>& gathered, Visit&& visit) const {
    idx_t used = 0;
    set.pattern.keys(set.shape, set.number, [&](const key_set& given, const query_range& of_query) {
      packed_set packed{.given = given, .lead = plan.lead_of(given), .keys = set.shared};
      if (!plan.in_place(given)) {
        index_map positions = given.positions;
        positions.first -= packed.lead;
        packed.gathered = given.count + packed.lead;
        packed.keys = gathered.from(used, positions);
        used += round_up(packed.gathered, panel_width<T>);
      }
      visit(packed, of_query);
    });
  }

  /// Prefetches what the next query set needs: its rows, their states if there are any, and, of the keys it gathers,
  /// the fraction from `begin` to `end` of `count`.
  void prefetch_next(const query_set& set, idx_t begin, idx_t end, idx_t count) const {
    const pattern_shape& s = set.shape;
    const idx_t next = set.number + 1;
    if (next >= set.pattern.query_sets(s)) return;
    const position_range queries = set.pattern.queries(s, next);
    for (idx_t r = begin; r < std::min(end, count_of(queries)); ++r) {
      const idx_t i = queries.begin + r * queries.step - s.first_position();
      prefetch_row(query(s), i);
      if (!set.first) prefetch_row(result(s), i);
    }
    set.pattern.keys(s, next, [&](const key_set& keys, const query_range&) {
      if (plan.in_place(keys)) return;
      for (idx_t n = keys.count * begin / count; n < keys.count * end / count; ++n) {
        prefetch_row(key(s), keys.positions[n]);
        prefetch_row(value(s), keys.positions[n]);
      }
    });
  }

  void attend_query_set(const query_set& set, const thread_scratch& scratch) const {
    const pattern_shape& s = set.shape;
    const position_range queries = set.pattern.queries(s, set.number);
    const idx_t count = count_of(queries);
    if (count == 0) return;
    for_each_key_set(set, scratch.gathered, [&](packed_set keys, const query_range&) {
      if (keys.gathered) keys.keys.pack(key(s), value(s), 0, keys.gathered);
    });

    row_block<P> block = scratch.block;
    const idx_t step = round_up(ceil_div(count, ceil_div(count, max_rows)), tile_rows);
    for (idx_t row = 0; row < count; row += step) {
      const idx_t rows = std::min(step, count - row), p0 = queries.begin + row * queries.step;
      block.begin(query(s), {p0 - s.first_position(), queries.step, nullptr}, rows, in.terms.query_factor());
      if (!set.first) set.states.resume(block);
      bool prefetched = false;
      for_each_key_set(set, scratch.gathered, [&](const packed_set& keys, const query_range& of_query) {
        for (idx_t r = 0; r < rows; ++r) {
          const key_range seen = keys.given.slots_of(s, p0 + r * queries.step, of_query);
          block.ranges[r] = {seen.begin + keys.lead, seen.end + keys.lead};
        }
        auto head_terms = in.terms.for_head(s.batch, s.head, s.first_position());
        if (!keys.given.self) head_terms.excluded.what = excluded_keys::kind::own;
        attend(block, keys.keys, head_terms, [&](idx_t r, idx_t n) {
          if (prefetched || !keys.gathered) return;
          prefetch_next(set, row + r, row + r + n, count);
          for (idx_t i = r; set.first && i < r + n; ++i) prefetch_row(result(s), block.positions[i]);
          prefetched = r + n == rows;
        });
      });
      if (set.last)
        in.finish(block, s.batch, s.head);
      else
        set.states.save(block);
    }
  }

  /// A wave of key heads.
  void attend_wave(const wave<head_scratch>& key_heads) const {
    const idx_t group = shape.group();
    if (plan.shared) {
      for (idx_t n = 0; n < key_heads.count; ++n) plan.mark_needed(key_heads.first + n, key_heads.scratch[n].needed);
      const idx_t steps = ceil_div(shape.keys, plan.pack_step);
      key_heads.for_each(steps, [&](idx_t key_head, const head_scratch& p, idx_t step, int) {
        const idx_t b = key_head / shape.kv_heads, kv = key_head % shape.kv_heads;
        const idx_t begin = step * plan.pack_step, end = std::min(begin + plan.pack_step, plan.lengths.keys(b));
        packed_keys<P> keys = p.keys;
        if (begin < end && p.needed[step]) keys.pack(head_of(in.k, b, kv), head_of(in.v, b, kv), begin, end);
      });
    }
    for (const pattern_ref& pattern : plan.patterns) {
      idx_t sets = 0;  // of the head that has most of them
      for (idx_t x = key_heads.first * group; x < (key_heads.first + key_heads.count) * group; ++x)
        sets = std::max(sets, pattern.query_sets(plan.shape_of(x)));
      key_heads.for_each(sets * group, [&](idx_t key_head, const head_scratch& p, idx_t step, int worker) {
        const pattern_shape s = plan.shape_of(key_head * group + step % group);
        if (step / group >= pattern.query_sets(s)) return;
        const query_set set{
            .pattern = pattern, .first = &pattern == &plan.patterns.front(), .last = &pattern == &plan.patterns.back(),
            .shape = s, .number = step / group, .shared = p.keys,
            .states = p.states ? p.states[step % group].of(in.out, s.batch, s.head) : row_states<T>{}};
        attend_query_set(set, scratch(worker));
      });
    }
  }

  void run() const {
    execution& exec = in.exec;
    const auto limit =
        exec.limit_threads({.operations = 2 * plan.visible_keys * static_cast<double>(shape.dim + shape.dim_v)});
    const idx_t key_heads = shape.batch * shape.kv_heads,
                bytes = shape.keys * (shape.dim + shape.dim_v) * static_cast<idx_t>(sizeof(T));
    for_each_wave(
        exec, key_heads, wave_size(exec, key_heads, bytes), [&](arena& memory) { return layout(memory); },
        [&](const wave<head_scratch>& w) { attend_wave(w); });
    for (idx_t b = 0; b < shape.batch; ++b)
      for (idx_t h = 0; h < shape.heads; ++h) in.clear_padding(b, h);
  }
};

/// The plan of a call. Throws std::invalid_argument for patterns that cannot be attended.
template <class S, class Score>
pattern_plan plan_of(const softmax_call<S, Score>& call, std::span<const pattern_ref> patterns) {
  pattern_plan plan{.shape = call.shape, .lengths = call.lengths, .causal = call.causal,
                    .panel = panel_width<compute_type<S>>, .patterns = patterns};
  plan.examine(call.check, call.exec);
  return plan;
}

template <class S, class Score>
void attend_by(const softmax_call<S, Score>& call, std::span<const pattern_ref> patterns) {
  const pattern_plan plan = plan_of(call, patterns);
  with_products<S>(call.exec, [&]<class P>(std::type_identity<P>) { pattern_driver<S, Score, P>{call, plan}.run(); });
}
template <class S, class Score, key_pattern Pattern>
void attend_by(const softmax_call<S, Score>& call, const Pattern& pattern) {
  attend_by(call, std::span<const pattern_ref>(patterns_of(pattern)));
}

}  // namespace attn::inline ATTN_ISA::detail
