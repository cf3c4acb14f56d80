// attn: the backward passes of block, strided, bigbird and pattern_softmax. backward_by(call, pattern) makes the plan
// of the pattern (pattern_plan.hpp), then pattern_backward_driver takes waves of key heads, query head by query head:
//   1. keys and values that several query sets see are packed once
//   2. for every pattern: its query sets, divided into parts with separate sums of dK and dV; sums of contiguous keys
//      are added in place, those of gathered keys are added at the end of the query set
//   3. the parts' sums are added in order and stored
#pragma once

#include <attn/softmax/detail/pattern_driver.hpp>
#include <attn/softmax/detail/softmax_backward_call.hpp>

namespace attn::inline ATTN_ISA {

/// The gradients of softmax attention by a pattern: those given. S is the element type of the call.
template <class S>
struct pattern_gradients {
  using real = compute_type<S>;

  tensor_view<S> q{}, k{}, v{};
  /// [H]
  tensor_view<real, 1> alibi_slopes{}, sinks{};
  /// Read, not written: the gradient of lse, [B, H, Lq].
  tensor_view<const real, 3> d_lse{};
  /// Add to what is there instead of writing it over.
  bool accumulate = false;
};

namespace detail {

/// Number of parts into which the query sets of a head are divided; each part sums up dK and dV separately. It depends
/// on the length only, so that threads do not change the sums.
inline idx_t backward_parts(idx_t queries) { return std::clamp<idx_t>(queries / 2048, 1, 4); }

template <class S, class Score, class ScoreBackward>
struct pattern_backward_driver {
  using T = compute_type<S>;
  using P = product_type<S>;

  const softmax_backward_call<S, Score, ScoreBackward>& in;
  const pattern_plan& plan;
  const attention_shape& shape = in.shape;

  idx_t stride_k() const { return backward_keys<P>::stride(shape.dim); }
  idx_t stride_v() const { return backward_keys<P>::stride(shape.dim_v); }
  idx_t slots() const { return round_up(shape.keys, panel_width<T>); }
  idx_t pack_steps() const { return ceil_div(shape.keys, plan.pack_step); }
  bool joined() const { return plan.patterns.size() > 1; }

  matrix_view<const S> key(const pattern_shape& s) const { return head_of(in.k, s.batch, s.head / shape.group()); }
  matrix_view<const S> value(const pattern_shape& s) const { return head_of(in.v, s.batch, s.head / shape.group()); }

  /// Memory that all threads share for one key head of one batch item.
  struct head_scratch {
    backward_keys<P> keys;  // where keys are packed once for all query sets
    bool* needed;           // per pack_step keys
    T *d_keys, *d_values;   // [parts][slots][stride]: sums of each part; null: not wanted
    T *key_errors, *value_errors;  // of these, with many queries
    bool* begun;            // [parts][pack_steps]: whether sums of these keys were begun; else they are 0
    T* dq;                  // [Lq][stride_k], for joined patterns: sums of the patterns that are done
    T* slopes;              // [parts]: their sums of the gradient of the slope
  };
  head_scratch layout(arena& memory) const {
    const idx_t parts = backward_parts(shape.queries);
    head_scratch shared{};
    if (plan.shared) {
      shared.keys = layout_keys(memory, shape.keys);
      shared.needed = memory.allocate<bool>(pack_steps());
    }
    if (in.dk) shared.d_keys = memory.allocate<T>(parts * slots() * stride_k());
    if (in.dv) shared.d_values = memory.allocate<T>(parts * slots() * stride_v());
    if (in.dk && many_queries(shape.queries)) shared.key_errors = memory.allocate<T>(parts * slots() * stride_k());
    if (in.dv && many_queries(shape.queries)) shared.value_errors = memory.allocate<T>(parts * slots() * stride_v());
    if (in.dq && joined()) shared.dq = memory.allocate<T>(shape.queries * stride_k());
    shared.begun = memory.allocate<bool>(parts * pack_steps());
    shared.slopes = memory.allocate<T>(parts);
    return shared;
  }
  backward_keys<P> layout_keys(arena& memory, idx_t count) const {
    return {.keys = packed_keys<P>::layout(memory, count, shape.dim, shape.dim),
            .values = packed_keys<P>::layout(memory, count, shape.dim_v, 0)};
  }

  /// Scratch of one thread: a block of rows, and the keys a query set gathers, with the sums of those not in ranges.
  struct thread_scratch {
    backward_rows<P> rows;
    backward_scratch<P> kernel;
    backward_keys<P> gathered;
    key_range* ranges;  // [max_rows]
    T* dq;              // [max_rows][stride_k]
  };
  thread_scratch scratch(int worker) const {
    return in.forward.exec.scratch(worker, [&](arena& memory) {
      thread_scratch s{.rows = backward_rows<P>::layout(memory, max_rows, shape.dim, shape.dim_v),
                       .kernel = in.layout_scratch(memory),
                       .gathered = layout_keys(memory, plan.gathered),
                       .ranges = memory.allocate<key_range>(max_rows),
                       .dq = nullptr};
      if (in.dk) s.gathered.d_keys = memory.allocate<T>(plan.not_in_place * stride_k());
      if (in.dv) s.gathered.d_values = memory.allocate<T>(plan.not_in_place * stride_v());
      if (in.dq) s.dq = memory.allocate<T>(round_up(max_rows, tile_rows) * stride_k());
      return s;
    });
  }

  /// One query set of a pattern, with the memory its threads share and the sums of its part.
  struct query_set {
    const pattern_ref& pattern;
    bool first, last;  // of joined patterns
    pattern_shape shape;
    idx_t number;
    backward_keys<P> shared;  // with the sums of all keys of the head
    bool* begun;
    T* dq;
  };

  /// A set of keys as the pattern gives it, and where it lies packed: in slots from `lead` on.
  struct packed_set {
    const key_set& given;
    idx_t lead;
    backward_keys<P> keys;
    idx_t gathered = 0;  // slots the query set packs itself; none: they are read in place
  };

  /// visit(packed_set, query_range) for every key set. Sums of contiguous ones are taken in place, wherever they are
  /// packed.
  template <class Visit>
  void for_each_key_set(const query_set& set, const backward_keys<P>& gathered, Visit&& visit) const {
    idx_t used = 0, summed = 0;
    set.pattern.keys(set.shape, set.number, [&](const key_set& given, const query_range& of_query) {
      packed_set packed{.given = given, .lead = plan.lead_of(given), .keys = set.shared};
      if (!plan.in_place(given)) {
        index_map positions = given.positions;
        positions.first -= packed.lead;
        packed.gathered = given.count + packed.lead;
        packed.keys = gathered.from(used, positions);
        const backward_keys<P>& sums = given.contiguous() ? set.shared : gathered;
        const idx_t from = given.contiguous() ? positions.first : summed;
        if (sums.d_keys) packed.keys.d_keys = sums.d_keys + from * stride_k();
        if (sums.d_values) packed.keys.d_values = sums.d_values + from * stride_v();
        if (sums.key_errors) packed.keys.key_errors = sums.key_errors + from * stride_k();
        if (sums.value_errors) packed.keys.value_errors = sums.value_errors + from * stride_v();
        const idx_t slots = round_up(packed.gathered, panel_width<T>);
        used += slots;
        if (!given.contiguous()) summed += slots;
      }
      visit(packed, of_query);
    });
  }

  /// Call before adding to sums of keys [begin, end) of the head.
  void begin_sums(const query_set& set, idx_t begin, idx_t end) const {
    for (idx_t step = begin / plan.pack_step; step * plan.pack_step < end; ++step)
      if (!std::exchange(set.begun[step], true)) clear_step(set.shared, step);
  }
  void clear_step(const backward_keys<P>& sums, idx_t step) const {
    const idx_t begin = step * plan.pack_step;
    sums.clear(begin, std::min(begin + plan.pack_step, slots()));
  }

  /// Adds gathered sums to those of all keys.
  void scatter(T* sums, idx_t stride, const key_set& keys, T* to, T* errors) const {
    for (idx_t n = 0; sums && n < keys.count; ++n) {
      const idx_t at = keys.positions[n] * stride;
      T* const row = to + at;
      if (errors)
        move_compensated(sums + n * stride, stride, T(1), row, errors + at);
      else for (idx_t d = 0; d < stride; d += width<T>)
        store<T>(row + d, add(load<T>(row + d), load<T>(sums + n * stride + d)));
    }
  }

  template <class Terms, class Back>
  void differentiate_set(const query_set& set, const thread_scratch& scratch, Terms& terms, Back& back) const {
    const pattern_shape& s = set.shape;
    const position_range queries = set.pattern.queries(s, set.number);
    const idx_t count = count_of(queries);
    if (count == 0) return;
    for_each_key_set(set, scratch.gathered, [&](packed_set keys, const query_range&) {
      if (keys.gathered) keys.keys.fill(key(s), value(s), 0, keys.gathered);
      if (!keys.given.contiguous()) return keys.keys.clear(0, keys.gathered);
      begin_sums(set, keys.given.positions.first, keys.given.positions.first + keys.given.count);
    });

    const idx_t step = round_up(ceil_div(count, ceil_div(count, max_rows)), tile_rows);
    for (idx_t row = 0; row < count; row += step) {
      const idx_t rows = std::min(step, count - row), p0 = queries.begin + row * queries.step;
      const index_map which{p0 - s.first_position(), queries.step, nullptr};
      in.pack_rows(scratch.rows, s.batch, s.head, head_of(in.q, s.batch, s.head), which, rows);
      if (scratch.dq) begin_rows(set, which, rows, scratch.dq);
      for_each_key_set(set, scratch.gathered, [&](const packed_set& keys, const query_range& of_query) {
        for (idx_t r = 0; r < rows; ++r) {
          const key_range seen = keys.given.slots_of(s, p0 + r * queries.step, of_query);
          scratch.ranges[r] = {seen.begin + keys.lead, seen.end + keys.lead};
        }
        terms.excluded.what = keys.given.self ? excluded_keys::kind::none : excluded_keys::kind::own;
        differentiate(scratch.rows, rows, scratch.ranges, which, keys.keys, terms, scratch.kernel, scratch.dq,
                      stride_k(), back);
      });
      if (scratch.dq) end_rows(set, which, rows, scratch.dq);
    }
    for_each_key_set(set, scratch.gathered, [&](const packed_set& keys, const query_range&) {
      if (keys.given.contiguous()) return;
      for (idx_t n = 0; n < keys.given.count; ++n)
        begin_sums(set, keys.given.positions[n], keys.given.positions[n] + 1);
      scatter(keys.keys.d_keys, stride_k(), keys.given, set.shared.d_keys, set.shared.key_errors);
      scatter(keys.keys.d_values, stride_v(), keys.given, set.shared.d_values, set.shared.value_errors);
    });
  }

  /// The sums of dQ of a block of rows: 0, or those of the joined patterns that are done.
  void begin_rows(const query_set& set, const index_map& which, idx_t rows, T* dq) const {
    std::fill_n(dq, round_up(rows, tile_rows) * stride_k(), T(0));
    for (idx_t r = 0; !set.first && r < rows; ++r)
      std::copy_n(set.dq + which[r] * stride_k(), stride_k(), dq + r * stride_k());
  }
  void end_rows(const query_set& set, const index_map& which, idx_t rows, const T* dq) const {
    for (idx_t r = 0; !set.last && r < rows; ++r)
      std::copy_n(dq + r * stride_k(), stride_k(), set.dq + which[r] * stride_k());
    if (!set.last) return;
    const matrix_view<S> all = head_of(in.dq, set.shape.batch, set.shape.head);
    const matrix_view<S> to{all.row(which.first), rows, all.cols, all.row_stride * which.step, all.col_stride};
    store_gradient_rows(dq, stride_k(), in.terms().scale, to, 0, rows, rows, in.accumulate);
  }

  /// One part of the query sets of a pattern, for one head: runs of consecutive query sets, which share keys. Runs are
  /// dealt to the parts in turn, because the query sets that see most keys come first.
  void differentiate_part(const pattern_ref& pattern, const pattern_shape& s, const head_scratch& shared, idx_t part,
                          int worker) const {
    const bool first = &pattern == &plan.patterns.front(), last = &pattern == &plan.patterns.back();
    backward_keys<P> keys = shared.keys;
    keys.keys.dim = shape.dim, keys.values.dim = shape.dim_v;
    if (in.dk) keys.d_keys = shared.d_keys + part * slots() * stride_k();
    if (in.dv) keys.d_values = shared.d_values + part * slots() * stride_v();
    if (shared.key_errors) keys.key_errors = shared.key_errors + part * slots() * stride_k();
    if (shared.value_errors) keys.value_errors = shared.value_errors + part * slots() * stride_v();
    bool* const begun = shared.begun + part * pack_steps();
    if (first && s.head % shape.group() == 0) std::fill_n(begun, pack_steps(), false);
    if (first) shared.slopes[part] = T(0);
    auto head_terms = in.terms().for_head(s.batch, s.head, s.first_position());
    auto back = in.back(head_terms);
    const thread_scratch own = scratch(worker);
    const idx_t sets = pattern.query_sets(s), parts = backward_parts(s.queries);
    const idx_t turn = std::max<idx_t>(1, sets / (4 * parts));
    for (idx_t from = part * turn; from < sets; from += parts * turn)
      for (idx_t n = from; n < std::min(from + turn, sets); ++n)
        differentiate_set({pattern, first, last, s, n, keys, begun, shared.dq}, own, head_terms, back);
    shared.slopes[part] += back.d_slope();
  }

  /// Stores step `step` of the keys' gradients, from the sums of all parts.
  void store_step(const head_scratch& shared, idx_t b, idx_t kv, idx_t step) const {
    const idx_t keys = plan.lengths.keys(b), begin = step * plan.pack_step,
                end = std::min(begin + plan.pack_step, shape.keys), real = std::min(end, keys);
    const backward_keys<P> sums{.keys = {.dim = shape.dim}, .values = {.dim = shape.dim_v},
                                .d_keys = shared.d_keys, .d_values = shared.d_values,
                                .key_errors = shared.key_errors, .value_errors = shared.value_errors};
    if (!shared.begun[step]) clear_step(sums, step);
    for (idx_t part = 1; part < backward_parts(plan.lengths.queries(b)); ++part) {
      if (!shared.begun[part * pack_steps() + step]) continue;
      sums.settle(part * slots() + begin, part * slots() + real);
      add_sums(sums.d_keys, part * slots() * stride_k(), begin * stride_k(), real * stride_k());
      add_sums(sums.d_values, part * slots() * stride_v(), begin * stride_v(), real * stride_v());
    }
    sums.store(in.dk, in.dv, b, kv, begin, end, keys, in.terms().scale, in.accumulate);
  }

  /// A wave of key heads.
  void differentiate_wave(const wave<head_scratch>& key_heads) const {
    const idx_t group = shape.group();
    if (plan.shared) {
      for (idx_t n = 0; n < key_heads.count; ++n) plan.mark_needed(key_heads.first + n, key_heads.scratch[n].needed);
      key_heads.for_each(pack_steps(), [&](idx_t key_head, const head_scratch& p, idx_t step, int) {
        const idx_t b = key_head / shape.kv_heads, kv = key_head % shape.kv_heads;
        const idx_t begin = step * plan.pack_step, end = std::min(begin + plan.pack_step, plan.lengths.keys(b));
        backward_keys<P> keys = p.keys;
        if (begin < end && p.needed[step]) keys.fill(head_of(in.k, b, kv), head_of(in.v, b, kv), begin, end);
      });
    }
    const idx_t most = backward_parts(shape.queries);
    for (idx_t in_group = 0; in_group < group; ++in_group) {
      for (const pattern_ref& pattern : plan.patterns)
        key_heads.for_each(most, [&](idx_t key_head, const head_scratch& p, idx_t part, int worker) {
          const pattern_shape s = plan.shape_of(key_head * group + in_group);
          if (part < backward_parts(s.queries)) differentiate_part(pattern, s, p, part, worker);
        });
      for (idx_t n = 0; in.d_slopes && n < key_heads.count; ++n) {
        const idx_t x = (key_heads.first + n) * group + in_group;
        for (idx_t part = 0; part < backward_parts(plan.shape_of(x).queries); ++part)
          in.slope_sums[x] += key_heads.scratch[n].slopes[part];
      }
    }
    key_heads.for_each(pack_steps(), [&](idx_t key_head, const head_scratch& p, idx_t step, int) {
      store_step(p, key_head / shape.kv_heads, key_head % shape.kv_heads, step);
    });
  }

  void run() const {
    if (!in.dq && !in.dk && !in.dv && !in.d_slopes) return;
    execution& exec = in.forward.exec;
    const idx_t key_heads = shape.batch * shape.kv_heads,
                bytes = 3 * shape.keys * (shape.dim + shape.dim_v) * static_cast<idx_t>(sizeof(T));
    for_each_wave(
        exec, key_heads, wave_size(exec, key_heads, bytes), [&](arena& memory) { return layout(memory); },
        [&](const wave<head_scratch>& w) { differentiate_wave(w); });
    for (idx_t x = 0; in.dq && !in.accumulate && x < shape.batch * shape.heads; ++x) {
      const pattern_shape s = plan.shape_of(x);
      clear_rows(head_of(in.dq, s.batch, s.head), s.queries, shape.queries);
    }
  }
};

template <class S, class Score, class ScoreBackward>
void backward_by(softmax_backward_call<S, Score, ScoreBackward>& call, std::span<const pattern_ref> patterns) {
  const pattern_plan plan = plan_of(call.forward, patterns);
  call.run(
      2 * plan.visible_keys * static_cast<double>(3 * call.shape.dim + 2 * call.shape.dim_v),
      [&](const auto& forward) { pattern_driver<S, Score>{forward, plan}.run(); },
      [&](const auto& c) { pattern_backward_driver<S, Score, ScoreBackward>{c, plan}.run(); });
}
template <class S, class Score, class ScoreBackward, key_pattern Pattern>
void backward_by(softmax_backward_call<S, Score, ScoreBackward>& call, const Pattern& pattern) {
  backward_by(call, std::span<const pattern_ref>(patterns_of(pattern)));
}

}  // namespace detail
}  // namespace attn::inline ATTN_ISA
