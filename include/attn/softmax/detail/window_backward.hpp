// attn: the driver of sliding_window_backward.
//
// A residue class of a head's dilation (sliding_window.hpp) is cut into parts of part_length() entries. A part owns its
// keys and its queries and computes their complete gradients. For that
//   - its own queries attend to all their keys, including those of neighbouring parts, for which they compute no dK and
//     dV;
//   - queries of neighbouring parts attend to its own keys only, without dQ.
// The work done twice is about w / (2 part_length()) of the whole, for a window of w keys on each side, and no part
// waits for another: scratch does not depend on the length.
//
// Global keys and queries take part in every part: what a part adds to their gradients is stored separately and summed
// in order.
#pragma once

#include <attn/core/detail/waves.hpp>
#include <attn/softmax/detail/softmax_backward_call.hpp>
#include <attn/softmax/detail/window_partial.hpp>
#include <attn/softmax/sliding_window.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <class S, class Call, class Gradients>
struct window_backward : window_sets {
  using T = compute_type<S>;
  using P = product_type<S>;

  const Call& in;
  const sliding_window_options<S>& options;
  const Gradients& gradients;
  const attention_shape& shape = in.shape;

  bool own() const { return bool(options.q_global); }  // projections of the global queries
  idx_t global_count() const { return globals.most; }
  idx_t part_length() const {
    const idx_t all = round_up(std::max<idx_t>(1, shape.keys), max_rows);  // at least one block, also without keys
    return std::min(all, round_up(std::max<idx_t>(2048, 8 * (left + right)), max_rows));
  }
  idx_t decay_entries() const { return in.d_log_decay ? 2 * global_count() : 0; }
  idx_t query_stride() const { return backward_keys<P>::stride(shape.dim); }
  idx_t value_stride() const { return backward_keys<P>::stride(shape.dim_v); }

  /// Classes and parts of a head.
  idx_t parts(idx_t h) const {
    return dilation(h) * std::max<idx_t>(1, ceil_div(ceil_div(shape.keys, dilation(h)), part_length()));
  }
  /// Whether all query heads of a key head have one dilation. Then a part handles them together; else the whole key
  /// head is one task.
  bool alike(idx_t kv) const {
    bool all = true;
    for (idx_t h = kv * shape.group(); h < (kv + 1) * shape.group(); ++h)
      all &= dilation(h) == dilation(kv * shape.group());
    return all;
  }
  /// Number of tasks of a key head.
  idx_t steps(idx_t kv) const { return alike(kv) ? parts(kv * shape.group()) : 1; }

  using partial = window_partial<T>;
  /// Sums of the gradients of all keys and values of a key head.
  struct key_sums {
    T *keys = nullptr, *values = nullptr;  // [Lk][stride]
  };
  /// The sums that the tasks of one key head leave to be added up.
  struct head_scratch {
    partial* parts;                   // [most parts]
    key_sums ordinary{}, projected{};  // where heads of a group differ in dilation
  };
  head_scratch layout(arena& memory, idx_t most_parts, bool sums) const {
    const idx_t n = global_count(), key = query_stride(), value = value_stride();
    const auto all_keys = [&](bool wanted) {
      return wanted ? key_sums{memory.allocate<T>(shape.keys * key), memory.allocate<T>(shape.keys * value)}
                    : key_sums{};
    };
    const idx_t group = shape.group(), queries = group * n * key;
    partial* const parts = memory.allocate_list(most_parts, [&](arena& m) {
      return partial::layout(m, {.keys = n * key, .values = n * value, .queries = queries,
                                 .relative_queries = in.d_relative_queries ? queries : 0, .slopes = group,
                                 .tables = group * in.table_size(), .relative = group * in.relative_entries(),
                                 .decay = group * decay_entries()});
    });
    const key_sums ordinary = all_keys(sums);
    return {parts, ordinary, all_keys(sums && own())};
  }

  /// Scratch of one thread.
  struct part_scratch {
    backward_scratch<P> block;
    backward_rows<P> rows;
    T *dq, *d_relative;                    // [max_rows][query_stride]
    mutable backward_keys<P> keys;         // of the class, without the global ones
    mutable backward_keys<P> global_keys;
    mutable backward_keys<P> own_keys;     // k_global and v_global of the part's keys
    class_rows rows_of_class;
  };
  part_scratch layout(arena& memory) const {
    const idx_t slots = std::min(part_length() + left + right, shape.keys), n = global_count();
    const auto keys = [&](idx_t count, bool k, bool v, bool errors = false) {
      return backward_keys<P>::layout(memory, count, shape.dim, shape.dim_v, k, v, errors);
    };
    return {.block = in.layout_scratch(memory),
            .rows = backward_rows<P>::layout(memory, max_rows, shape.dim, shape.dim_v, bool(in.terms().by_distance)),
            .dq = memory.allocate<T>(max_rows * query_stride()),
            .d_relative = memory.allocate<T>(in.d_relative_queries ? max_rows * query_stride() : 0),
            .keys = keys(slots, bool(in.dk), bool(in.dv), many_queries(slots)),
            .global_keys = keys(n, true, true),
            .own_keys = keys(own() ? part_length() : 0, bool(gradients.k_global), bool(gradients.v_global)),
            .rows_of_class = class_rows::layout(memory, slots, n > 0, max_rows)};
  }

  /// One part: the keys [k0, k1) of class r of a key head, for the query heads [h, h_end), whose dilation is d.
  struct part_of_class : class_rows {
    idx_t b, kv, h, h_end;
    const part_scratch& s;
    idx_t k0 = 0, k1 = 0;

    /// Adds the keys of the class that the part owns.
    decay_gradients owned(decay_gradients of) const {
      of.first = r + d * k0, of.end = r + d * k1;
      return of;
    }
  };

  /// Packs the keys of a part and their neighbours, without the global ones, which are packed separately.
  void pack(const part_of_class& p) const {
    const auto key = head_of(in.k, p.b, p.kv), value = head_of(in.v, p.b, p.kv);
    p.s.own_keys.keys.positions = {p.r + p.d * p.k0, p.d, nullptr};
    if (p.listed()) {
      p.s.global_keys.keys.positions = {0, 1, p.globals.data()};
      p.s.global_keys.pack(key, value, 0, p.globals.before(in.lengths().keys(p.b)));
    }
    p.s.keys.pack(key, value, 0, p.keys_to_pack(p.s.keys.keys.positions));
  }

  T* table_of(const partial& sums, idx_t in_group) const {
    return in.d_relative_keys ? sums.tables() + in_group * in.table_size() : nullptr;
  }
  /// The same by global key, of a query head.
  decay_gradients of_globals(decay_gradients of, const partial& sums, idx_t in_group) const {
    of.keys = sums.decay() + in_group * decay_entries() + global_count();
    of.first = 0, of.end = global_count(), of.by_slot = true;
    return of;
  }

  /// Queries [begin, end) of the part's class and head h; `owned`: the part's own.
  void take_queries(const part_of_class& p, idx_t h, idx_t begin, idx_t end, bool owned, const partial& sums) const {
    const auto head_terms = in.terms().for_head(p.b, h, p.shift);
    auto back = in.back(head_terms);
    back.sum_slope &= owned;  // every key of a query counts once
    const idx_t in_group = h - p.kv * shape.group();
    if (owned) back.relative = in.relative_list(sums.relative(), in_group);
    const decay_gradients decay = in.decay_list(in.sums_of(p.b * shape.heads + h));
    back.decay = p.owned(decay);
    if (!owned) back.decay.queries = nullptr;
    key_range ranges[max_rows];
    T* const dq = owned && in.dq ? p.s.dq : nullptr;
    T* const d_relative = owned && in.d_relative_queries ? p.s.d_relative : nullptr;
    if (owned) back.by_distance = in.distance_sums(table_of(sums, in_group), dq, d_relative, query_stride());
    const idx_t all = in.lengths().keys(p.b);
    for (idx_t t = begin; t < end; t += max_rows) {
      index_map which;
      const idx_t rows = p.rows_of(t, std::min(t + max_rows, end), which);
      in.pack_rows(p.s.rows, p.b, h, head_of(in.q, p.b, h), which, rows);
      for (idx_t row = 0; row < rows; ++row) {
        const idx_t u = p.entry(which[row]);
        idx_t first = u - left, last = u + right + 1;
        if (!owned) first = std::max(first, p.k0), last = std::min(last, p.k1);
        ranges[row] = {p.slot(first), p.slot(last)};
      }
      for (T* x : {dq, d_relative})
        if (x) std::fill_n(x, max_rows * query_stride(), T(0));
      differentiate(p.s.rows, rows, ranges, which, p.s.keys, head_terms, p.s.block, dq, query_stride(), back);
      if (!owned) continue;
      if (p.listed()) {
        for (idx_t row = 0; row < rows; ++row)
          ranges[row] = {0, p.globals.before(in.forward.causal ? std::min(all, which[row] + p.shift + 1) : all)};
        const decay_gradients of_class = back.decay;
        if (decay) back.decay = of_globals(decay, sums, in_group);
        differentiate(p.s.rows, rows, ranges, which, p.s.global_keys, head_terms, p.s.block, dq, query_stride(), back);
        back.decay = of_class;
      }
      const auto store = [&](const T* sums_of, const tensor_view<S>& to, idx_t row) {
        if (to)
          store_gradient_row(sums_of + row * query_stride(), in.terms().scale, head_of(to, p.b, h), which[row],
                             in.accumulate);
      };
      for (idx_t row = 0; row < rows; ++row) store(dq, in.dq, row), store(d_relative, in.d_relative_queries, row);
    }
    sums.slopes()[in_group] += back.d_slope();
  }

  /// Rows of global queries of head h with the part's own keys, and with the global ones where `first`.
  void take_global_queries(const part_of_class& p, idx_t h, bool first, const partial& part) const {
    const idx_t in_group = h - p.kv * shape.group();
    T* const sums = part.queries() + in_group * global_count() * query_stride();
    const auto head_terms = in.terms().for_head(p.b, h, p.shift);
    auto back = in.back(head_terms);
    back.relative = in.relative_list(part.relative(), in_group);
    decay_gradients decay = p.owned(in.decay_list(in.sums_of(p.b * shape.heads + h)));
    if (decay) decay.queries = part.decay() + in_group * decay_entries(), decay.listed = p.globals.positions;
    key_range ranges[max_rows];
    const idx_t all = in.lengths().keys(p.b);
    const idx_t g0 = p.globals.before(p.shift), g1 = p.globals.before(in.forward.last_shift(p.b));
    const bool wanted = own() ? bool(gradients.q_global) : bool(in.dq);
    T* const dq = wanted ? p.s.dq : nullptr;
    T* const d_relative = in.d_relative_queries ? p.s.d_relative : nullptr;
    back.by_distance = in.distance_sums(table_of(part, in_group), dq, d_relative, query_stride());
    for (idx_t g = g0; g < g1; g += max_rows) {
      const idx_t rows = std::min(max_rows, g1 - g);
      for (idx_t row = 0; row < rows; ++row) p.row_list[row] = p.globals[g + row] - p.shift;
      const index_map which{0, 1, p.row_list};
      in.pack_rows(p.s.rows, p.b, h, head_of(own() ? options.q_global : in.q, p.b, h), which, rows);
      for (T* x : {dq, d_relative})
        if (x) std::fill_n(x, max_rows * query_stride(), T(0));
      const auto take = [&](const backward_keys<P>& set, const decay_gradients& sums_of_set, const auto& range_of) {
        back.decay = sums_of_set;
        for (idx_t row = 0; row < rows; ++row)
          ranges[row] = range_of(in.forward.causal ? std::min(all, which[row] + p.shift + 1) : all);
        differentiate(p.s.rows, rows, ranges, which, set, head_terms, p.s.block, dq, query_stride(), back);
      };
      const auto entries_before = [&](idx_t end) { return std::clamp(ceil_div(end - p.r, p.d), p.k0, p.k1); };
      if (own())
        take(p.s.own_keys, decay, [&](idx_t end) { return key_range{0, entries_before(end) - p.k0}; });
      else
        take(p.s.keys, decay, [&](idx_t end) { return key_range{p.slot(p.k0), p.slot(entries_before(end))}; });
      if (first && !own())
        take(p.s.global_keys, decay ? of_globals(decay, part, in_group) : decay,
             [&](idx_t end) { return key_range{0, p.globals.before(end)}; });
      for (idx_t row = 0; dq && row < rows; ++row)
        for (idx_t d = 0; d < shape.dim; ++d) sums[(g + row) * query_stride() + d] += dq[row * query_stride() + d];
      T* const of_relative = part.relative_queries() + (in_group * global_count() + g) * query_stride();
      for (idx_t x = 0; d_relative && x < rows * query_stride(); ++x) of_relative[x] += d_relative[x];
    }
    part.slopes()[in_group] += back.d_slope();
  }

  /// One part. store(projected, row of k, sums of dK, sums of dV) is called for its own keys except global ones, then
  /// for those of k_global.
  template <class Store>
  void take_part(part_of_class p, idx_t number, const partial& sums, const Store& store) const {
    const idx_t n = in.lengths().keys(p.b), keys = std::max<idx_t>(0, ceil_div(n - p.r, p.d));
    const idx_t end = first_of(in.forward.last_shift(p.b), p.r, p.d);  // of the class's queries
    const idx_t seen_globals = p.globals.before(n);
    p.k0 = number * part_length();
    if (number > 0 && p.k0 >= keys) return;
    p.k1 = std::max(p.k0, std::min(p.k0 + part_length(), keys));
    p.low = std::max<idx_t>(0, p.k0 - left);
    p.high = std::max(p.low, std::min(keys, p.k1 + right));
    pack(p);
    const part_scratch& s = p.s;
    if (own())
      s.own_keys.pack(head_of(options.k_global, p.b, p.kv), head_of(options.v_global, p.b, p.kv), 0, p.k1 - p.k0);

    const idx_t q_first = first_of(p.shift, p.r, p.d);
    const bool last = p.k0 + part_length() >= keys;  // it also has the queries beyond the keys
    const idx_t q1 = last ? end : std::min(p.k0 + part_length(), end);
    for (idx_t h = p.h; h < p.h_end; ++h) {
      if (number > 0) take_queries(p, h, std::max(q_first, p.k0 - right), std::min(p.k0, end), false, sums);
      take_queries(p, h, number > 0 ? std::max(q_first, p.k0) : q_first, q1, true, sums);
      take_queries(p, h, std::max(q1, q_first), std::min(p.k1 + left, end), false, sums);
      if (p.listed()) take_global_queries(p, h, p.r == 0 && number == 0, sums);
    }
    const auto row_of = [](T* rows, idx_t stride, idx_t row) { return rows ? rows + row * stride : nullptr; };
    const auto give = [&](bool projected, const backward_keys<P>& from, idx_t slot, idx_t row) {
      store(projected, row, row_of(from.d_keys, query_stride(), slot), row_of(from.d_values, value_stride(), slot));
    };
    s.keys.settle(p.slot(p.k0), p.slot(p.k1));
    for (idx_t slot = p.slot(p.k0); slot < p.slot(p.k1); ++slot)
      give(false, s.keys, slot, s.keys.keys.positions[slot]);
    for (idx_t t = p.k0; own() && t < p.k1; ++t) give(true, s.own_keys, t - p.k0, p.r + p.d * t);
    for (idx_t x = 0; x < seen_globals * query_stride(); ++x) sums.keys()[x] += s.global_keys.d_keys[x];
    for (idx_t x = 0; x < seen_globals * value_stride(); ++x) sums.values()[x] += s.global_keys.d_values[x];
  }

  /// Row of k and v, or of k_global and v_global; sums that are null are 0.
  void store_key(bool projected, idx_t b, idx_t kv, idx_t row, const T* d_key, const T* d_value) const {
    const auto &dk = projected ? gradients.k_global : in.dk, &dv = projected ? gradients.v_global : in.dv;
    if (dk) store_gradient_row(d_key, in.terms().scale, head_of(dk, b, kv), row, in.accumulate);
    if (dv) store_gradient_row(d_value, T(1), head_of(dv, b, kv), row, in.accumulate);
  }

  /// Task `step` of a key head: one part of all its query heads, or all parts of one query head after the other.
  void take(idx_t key_head, const head_scratch& scratch, idx_t step, int worker) const {
    const idx_t b = key_head / shape.kv_heads, kv = key_head % shape.kv_heads, group = shape.group(), h0 = kv * group;
    if (step >= steps(kv)) return;
    const part_scratch s = in.forward.exec.scratch(worker, [&](arena& memory) { return layout(memory); });
    const auto part = [&](idx_t h, idx_t h_end, idx_t n) {
      class_rows rows = s.rows_of_class;
      rows.d = dilation(h), rows.r = n % rows.d, rows.shift = in.forward.shift(b), rows.globals = globals(b);
      return part_of_class{rows, b, kv, h, h_end, s};
    };
    scratch.parts[step].clear();
    if (alike(kv))
      return take_part(part(h0, h0 + group, step), step / dilation(h0), scratch.parts[step],
                       [&](bool projected, idx_t row, const T* d_key, const T* d_value) {
                         store_key(projected, b, kv, row, d_key, d_value);
                       });
    const key_sums sums[] = {scratch.ordinary, scratch.projected};
    const auto row_of = [](T* rows, idx_t stride, idx_t row) { return rows ? rows + row * stride : nullptr; };
    for (const key_sums& x : sums) {
      if (x.keys) std::fill_n(x.keys, shape.keys * query_stride(), T(0));
      if (x.values) std::fill_n(x.values, shape.keys * value_stride(), T(0));
    }
    for (idx_t h = h0; h < h0 + group; ++h)
      for (idx_t n = 0; n < parts(h); ++n)
        take_part(part(h, h + 1, n), n / dilation(h), scratch.parts[step],
                  [&](bool projected, idx_t row, const T* d_key, const T* d_value) {
                    T* const key = sums[projected].keys + row * query_stride();
                    T* const value = sums[projected].values + row * value_stride();
                    for (idx_t d = 0; d_key && d < shape.dim; ++d) key[d] += d_key[d];
                    for (idx_t d = 0; d_value && d < shape.dim_v; ++d) value[d] += d_value[d];
                  });
    for (int projected = 0; projected < 1 + own(); ++projected)
      for (idx_t row = 0; row < in.lengths().keys(b); ++row)
        if (projected || !globals(b).contains(row))
          store_key(projected, b, kv, row, row_of(sums[projected].keys, query_stride(), row),
                    row_of(sums[projected].values, value_stride(), row));
  }

  /// Adds up and stores, in order, the sums that the parts of a key head left, and zeros for rows that no part has.
  void finish(idx_t key_head, const head_scratch& scratch) const {
    const idx_t b = key_head / shape.kv_heads, kv = key_head % shape.kv_heads, n = in.lengths().keys(b);
    const global_list global = globals(b);
    const idx_t shift = in.forward.shift(b), seen_globals = global.before(n);
    const idx_t g0 = global.before(shift), g1 = global.before(in.forward.last_shift(b));  // of the queries
    const partial& sums = scratch.parts[0];
    for (idx_t step = 1; step < steps(kv); ++step) sums.add(scratch.parts[step]);
    for (idx_t g = 0; g < seen_globals; ++g)
      store_key(false, b, kv, global[g], sums.keys() + g * query_stride(),
                sums.values() + g * value_stride());
    for (idx_t row = n; row < shape.keys; ++row)
      for (int projected = 0; projected < 1 + own(); ++projected) store_key(projected, b, kv, row, nullptr, nullptr);
    for (idx_t in_group = 0; in_group < shape.group(); ++in_group) {
      const idx_t h = kv * shape.group() + in_group;
      const T* const queries = sums.queries() + in_group * global_count() * query_stride();
      const auto store = [&](const tensor_view<S>& to, idx_t i, const T* sum) {
        if (to) store_gradient_row(sum, in.terms().scale, head_of(to, b, h), i, in.accumulate);
      };
      for (idx_t i = in.lengths().queries(b); i < shape.queries; ++i)
        store(in.dq, i, nullptr), store(in.d_relative_queries, i, nullptr);
      for (idx_t i = 0; gradients.q_global && i < shape.queries; ++i)
        if (i >= in.lengths().queries(b) || !global.contains(i + shift)) store(gradients.q_global, i, nullptr);
      for (idx_t g = g0; g < g1; ++g) {
        const idx_t i = global[g] - shift;
        if (own()) store(in.dq, i, nullptr);
        store(own() ? gradients.q_global : in.dq, i, queries + g * query_stride());
        store(in.d_relative_queries, i, sums.relative_queries() + (in_group * global_count() + g) * query_stride());
      }
      if (in.d_relative_keys) in.add_table(b * shape.heads + h, sums.tables() + in_group * in.table_size());
      if (in.d_slopes) in.slope_sums[b * shape.heads + h] += sums.slopes()[in_group];
      in.add_sums(b * shape.heads + h, sums.relative() + in_group * in.relative_entries(), in.relative_entries());
      if (const decay_gradients to = in.decay_list(in.sums_of(b * shape.heads + h))) {
        const double *const of_queries = sums.decay() + in_group * decay_entries(),
                     *const of_keys = of_queries + global_count();
        for (idx_t g = g0; g < g1; ++g) to.queries[global[g] - shift] += of_queries[g];
        for (idx_t g = 0; g < seen_globals; ++g) to.keys[global[g]] += of_keys[g];
      }
    }
  }

  void run() const {
    execution& exec = in.forward.exec;
    idx_t most_steps = 1;
    for (idx_t kv = 0; kv < shape.kv_heads; ++kv) most_steps = std::max(most_steps, steps(kv));
    bool sums = false;
    for (idx_t kv = 0; kv < shape.kv_heads; ++kv) sums |= !alike(kv);
    // Key heads share no memory: as many are in progress as give every thread several parts.
    const idx_t key_heads = shape.batch * shape.kv_heads, threads = exec.active_threads();
    for_each_wave(
        exec, key_heads, threads == 1 ? 1 : ceil_div(4 * threads, most_steps),
        [&](arena& memory) { return layout(memory, most_steps, sums); },
        [&](const wave<head_scratch>& w) {
          w.for_each(most_steps,
                     [&](idx_t x, const head_scratch& s, idx_t step, int worker) { take(x, s, step, worker); });
          w.for_each(1, [&](idx_t key_head, const head_scratch& s, idx_t, int) { finish(key_head, s); });
        });
  }
};

}}}  // namespace attn::ATTN_ISA::detail
