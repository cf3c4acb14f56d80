// attn: attention by a pattern, what block, strided, bigbird and pattern_softmax share:
//   call_by_pattern()        views, shapes and the common options; the operator checks its own
//   pattern_driver           the plan of the pattern (pattern_plan.hpp), then waves of key heads:
//     1. keys and values that several query sets see are packed once, pack_step at a time
//     2. for every query set: pack its other keys; for every block of its rows, for every key set: attend
//     3. rows of joined patterns are set aside between one pattern and the next
#pragma once

#include <attn/core/detail/arguments.hpp>
#include <attn/core/detail/prefetch.hpp>
#include <attn/core/detail/waves.hpp>
#include <attn/softmax/detail/pattern_plan.hpp>
#include <attn/softmax/detail/row_states.hpp>

namespace attn::inline ATTN_ISA::detail {

/// The options every operator by a pattern has.
template <class T>
struct pattern_settings {
  std::optional<T> scale;
  bool causal;
  list_view<index> lengths, query_lengths, key_lengths;
  std::optional<T> softcap;
  list_view<T> alibi_slopes, sinks;
  tensor_view<T, 3> lse;
};

/// What such an operator is called with.
template <class S>
struct pattern_inputs {
  using T = compute_type<S>;
  tensor_view<const S> q, k, v;
  tensor_view<S> out;
  pattern_settings<T> options;
  attention_shape shape;
  sequence_lengths lengths;

  matrix_view<const S> query(const pattern_shape& s) const { return head_of(q, s.batch, s.head); }
  matrix_view<const S> key(const pattern_shape& s) const { return head_of(k, s.batch, s.head / shape.group()); }
  matrix_view<const S> value(const pattern_shape& s) const { return head_of(v, s.batch, s.head / shape.group()); }
  matrix_view<S> result(const pattern_shape& s) const { return head_of(out, s.batch, s.head); }
};

template <class S, class Options>
pattern_inputs<S> check_pattern_inputs(const validator& check, const tensor_view<const S>& q,
                                       const tensor_view<const S>& k, const tensor_view<const S>& v,
                                       const tensor_view<S>& out, const Options& o) {
  pattern_inputs<S> in{.q = q,
                       .k = k,
                       .v = v,
                       .out = out,
                       .options = {.scale = o.scale,
                                   .causal = o.causal,
                                   .lengths = o.lengths,
                                   .query_lengths = o.query_lengths,
                                   .key_lengths = o.key_lengths,
                                   .softcap = o.softcap,
                                   .alibi_slopes = o.alibi_slopes,
                                   .sinks = o.sinks,
                                   .lse = o.lse},
                       .shape = check_attention(check, q, k, v, out),
                       .lengths = {}};
  in.lengths = check_lengths(check, in.shape, in.options);
  check_softmax_options(check, in.shape, in.options, q, k, v, out);
  return in;
}

template <class S, class Score>
struct pattern_driver {
  using T = compute_type<S>;

  const pattern_inputs<S>& in;
  const pattern_plan& plan;
  score_terms<T, Score> terms;

  /// What all threads share of one pair of batch item and key head.
  struct pair_scratch {
    packed_keys<T> keys;    // where keys are packed once for all query sets
    row_states<T>* states;  // per query head, for joined patterns
    bool* needed;           // per pack_step keys
  };
  pair_scratch layout(arena& memory) const {
    const attention_shape& shape = in.shape;
    pair_scratch pair{};
    if (plan.shared) {
      pair.keys = packed_keys<T>::layout(memory, shape.keys, shape.dim, shape.dim_v);
      pair.needed = memory.allocate<bool>(ceil_div(shape.keys, plan.pack_step));
    }
    if (plan.joined())
      pair.states = memory.allocate_list(shape.group(), [&](arena& m) { return row_states<T>::layout(m, in.out); });
    return pair;
  }

  /// Scratch of one thread: a block of rows, and the keys a query set gathers.
  struct thread_scratch {
    row_block<T> block;
    packed_keys<T> gathered;
  };
  thread_scratch scratch(execution& exec, int worker) const {
    return exec.scratch(worker, [&](arena& memory) {
      return thread_scratch{row_block<T>::layout(memory, in.shape.dim, in.shape.dim_v),
                            packed_keys<T>::layout(memory, plan.gathered, in.shape.dim, in.shape.dim_v)};
    });
  }

  /// One query set of a pattern, with what its threads share.
  struct query_set {
    const pattern_ref& pattern;
    bool first, last;  // of joined patterns
    pattern_shape shape;
    index number;
    packed_keys<T> shared;
    row_states<T> states;
  };

  /// A set of keys as the pattern gives it, and as it lies packed: in slots from `lead` on.
  struct packed_set {
    const key_set& given;
    key_set packed;
    packed_keys<T> keys;
    bool in_place;

    index lead() const { return given.contiguous() ? given.positions.first - packed.positions.first : 0; }
  };

  /// visit(packed_set, query_range) for every key set.
  template <class Visit>
  void for_each_key_set(const query_set& set, const packed_keys<T>& gathered, Visit&& visit) const {
    index used = 0;
    set.pattern.keys(set.shape, set.number, [&](const key_set& given, const query_range& of_query) {
      const key_set packed = plan.as_packed(given);
      if (plan.in_place(given)) return visit(packed_set{given, packed, set.shared, true}, of_query);
      visit(packed_set{given, packed, gathered.from(used, packed.positions), false}, of_query);
      used += round_up(packed.count, panel_width<T>);
    });
  }

  /// Prefetches what the next query set needs: its rows, their states if there are any, and of what it gathers the part
  /// from `begin` to `end` of `count`.
  void prefetch_next(const query_set& set, index begin, index end, index count) const {
    const pattern_shape& s = set.shape;
    const index next = set.number + 1;
    if (next >= set.pattern.query_sets(s)) return;
    const auto query = in.query(s), key = in.key(s), value = in.value(s);
    const auto result = in.result(s);
    const position_range queries = set.pattern.queries(s, next);
    for (index r = begin; r < std::min(end, count_of(queries)); ++r) {
      const index i = queries.begin + r * queries.step - s.first_position();
      prefetch_row(query, i);
      if (!set.first) prefetch_row(result, i);
    }
    set.pattern.keys(s, next, [&](const key_set& keys, const query_range&) {
      if (plan.in_place(keys)) return;
      for (index n = keys.count * begin / count; n < keys.count * end / count; ++n) {
        prefetch_row(key, keys.positions[n]);
        prefetch_row(value, keys.positions[n]);
      }
    });
  }

  void attend_query_set(const query_set& set, const thread_scratch& scratch) const {
    const pattern_shape& s = set.shape;
    const position_range queries = set.pattern.queries(s, set.number);
    const index count = count_of(queries);
    if (count == 0) return;
    for_each_key_set(set, scratch.gathered, [&](packed_set keys, const query_range&) {
      if (!keys.in_place) keys.keys.pack(in.key(s), in.value(s), 0, keys.packed.count);
    });

    row_block<T> block = scratch.block;
    const auto result = in.result(s);
    const index step = round_up(ceil_div(count, ceil_div(count, max_rows)), tile_rows);
    for (index row = 0; row < count; row += step) {
      const index rows = std::min(step, count - row), p0 = queries.begin + row * queries.step;
      block.begin(in.query(s), {p0 - s.first_position(), queries.step, nullptr}, rows, terms.query_factor());
      if (!set.first) set.states.resume(block);
      bool prefetched = false;
      const auto prefetch = [&](index r, index n) {
        if (prefetched) return;
        prefetch_next(set, row + r, row + r + n, count);
        for (index i = r; set.first && i < r + n; ++i) prefetch_row(result, block.positions[i]);
        prefetched = r + n == rows;
      };
      for_each_key_set(set, scratch.gathered, [&](const packed_set& keys, const query_range& of_query) {
        const index lead = keys.lead();
        for (index r = 0; r < rows; ++r) {
          const key_range seen = keys.given.slots_of(s, p0 + r * queries.step, of_query);
          block.ranges[r] = {seen.begin + lead, seen.end + lead};
        }
        auto head_terms = terms.for_head(s.batch, s.head, s.first_position());
        if (!keys.given.self) head_terms.excluded.what = excluded_keys::kind::own;
        if (keys.in_place)
          attend(block, keys.keys, head_terms);
        else
          attend(block, keys.keys, head_terms, prefetch);
      });
      if (set.last)
        finish(block, result, per_head(in.options.sinks, s.head), row_of(in.options.lse, s.batch, s.head),
               in.options.lse.stride(2));
      else
        set.states.save(block);
    }
  }

  /// A wave of pairs of batch item and key head.
  void attend_pairs(const wave<pair_scratch>& pairs) const {
    const attention_shape& shape = in.shape;
    const index group = shape.group();
    if (plan.shared) {
      for (index n = 0; n < pairs.count; ++n)
        plan.mark_needed((pairs.first + n) / shape.kv_heads, (pairs.first + n) % shape.kv_heads,
                         pairs.scratch[n].needed);
      pairs.for_each(ceil_div(shape.keys, plan.pack_step), [&](index pair, const pair_scratch& p, index step, int) {
        const index b = pair / shape.kv_heads, kv = pair % shape.kv_heads;
        const index begin = step * plan.pack_step, end = std::min(begin + plan.pack_step, in.lengths.keys(b));
        packed_keys<T> keys = p.keys;
        if (begin < end && p.needed[step]) keys.pack(head_of(in.k, b, kv), head_of(in.v, b, kv), begin, end);
      });
    }
    const auto shape_of = [&](index pair, index n) {  // of its query head n
      return plan.shape_of(pair / shape.kv_heads, pair % shape.kv_heads * group + n);
    };
    for (const pattern_ref& pattern : plan.patterns) {
      index sets = 0;  // of the head that has most
      for (index n = 0; n < pairs.count * group; ++n)
        sets = std::max(sets, pattern.query_sets(shape_of(pairs.first + n / group, n % group)));
      pairs.for_each(sets * group, [&](index pair, const pair_scratch& p, index step, int worker) {
        const pattern_shape s = shape_of(pair, step % group);
        const query_set set{.pattern = pattern,
                            .first = &pattern == &plan.patterns.front(),
                            .last = &pattern == &plan.patterns.back(),
                            .shape = s,
                            .number = step / group,
                            .shared = p.keys,
                            .states = p.states ? p.states[step % group].of(in.out, s.batch, s.head) : row_states<T>{}};
        if (set.number < pattern.query_sets(s)) attend_query_set(set, scratch(pairs.exec, worker));
      });
    }
  }

  void run(execution& exec) const {
    const attention_shape& shape = in.shape;
    const auto limit =
        exec.limit_threads({.operations = 2 * plan.pairs * static_cast<double>(shape.dim + shape.dim_v)});
    const index pairs = shape.batch * shape.kv_heads,
                bytes = shape.keys * (shape.dim + shape.dim_v) * static_cast<index>(sizeof(T));
    for_each_wave(
        exec, pairs, wave_size(exec, pairs, bytes), [&](arena& memory) { return layout(memory); },
        [&](const wave<pair_scratch>& w) { attend_pairs(w); });
    for (index b = 0; b < shape.batch; ++b)
      for (index h = 0; h < shape.heads; ++h)
        clear_rows(head_of(in.out, b, h), in.lengths.queries(b), shape.queries, row_of(in.options.lse, b, h),
                   in.options.lse.stride(2));
  }
};

template <class S, class Score>
void attend_by_patterns(const validator& check, const pattern_inputs<S>& in, std::span<const pattern_ref> patterns,
                        Score& score, execution& exec) {
  using T = compute_type<S>;
  pattern_plan plan{.patterns = patterns,
                    .shape = in.shape,
                    .lengths = in.lengths,
                    .causal = in.options.causal,
                    .panel = panel_width<T>};
  plan.examine(check, exec);
  pattern_driver<S, Score>{.in = in, .plan = plan, .terms = terms_of<T>(in.options, in.shape.dim, &score)}.run(exec);
}

/// A call whose shapes and common options have passed their checks.
template <class S, class Score>
struct pattern_call {
  const validator& check;
  const pattern_inputs<S>& in;
  Score& score;
  execution& exec;

  /// A table of the pattern: it can be read, and what is written does not overlap it.
  void check_table(const char* name, const memory_layout& table) const {
    check.memory({{"out", in.out}, {"lse", in.options.lse}}, {{name, table}});
  }
  template <class Pattern>
  void attend(const Pattern& pattern) const {
    attend_by_patterns<S, Score>(check, in, patterns_of(pattern), score, exec);
  }
};

/// What every operator by a pattern does with its arguments; body(pattern_call, options) checks what is its own and
/// attends.
template <template <class> class Options, class Q, class K, class V, class O, class Given, class Score, class Body>
void call_by_pattern(const char* name, const Q& q, const K& k, const V& v, O&& out, Given& options, Score& score,
                     execution_ref& exec, const Body& body) {
  require_one_element_type<const Q&, const K&, const V&, O>();
  using S = element_of<const Q&>;
  const validator check(name);
  const auto& given = options_or_default<Options<S>>(options);
  auto&& function = callable_or_default<no_score>(score);
  using function_type = std::remove_reference_t<decltype(function)>;
  require_score<function_type, compute_type<S>>();
  const auto in = check_pattern_inputs<S>(check, as_view(q), as_view(k), as_view(v), as_view(out), given);
  body(pattern_call<S, function_type>{check, in, function, execution_of(exec, options, score)}, given);
}

}  // namespace attn::inline ATTN_ISA::detail
