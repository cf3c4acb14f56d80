// attn: the driver of sliding_window_backward.
//
// A residue class of a head's dilation (sliding_window.hpp) is cut into equal parts of most_keys() at most. The queries
// of a part attend to all their keys, its own and the nearest ones of both neighbours, and it sums up the gradients of
// all of these. Parts are taken in waves, in order: keys that two parts have seen are stored when both are done, from
// the sums of both. The last part of a wave is kept for the next, so that scratch does not depend on the length.
//
// Every part sees the global keys and queries: what it adds to their gradients is stored separately, to be summed in
// order.
#pragma once

#include <attn/softmax/detail/window_backward_parts.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <class S, class Score, class ScoreBackward>
struct sliding_window_backward_driver : window_parts<S, Score, ScoreBackward> {
  using base = window_parts<S, Score, ScoreBackward>;
  using typename base::T, typename base::P, typename base::key_sums, typename base::partial;
  using typename base::part_of_class, typename base::part_scratch;
  using base::in, base::options, base::gradients, base::shape, base::left, base::right, base::globals, base::dilation;
  using base::first_of, base::own, base::one_dilation, base::parts, base::parts_of_class, base::parts_of_keys;
  using base::steps, base::global_count, base::slot_count, base::decay_entries, base::query_stride;
  using base::value_stride, base::layout, base::layout_part;

  /// Packs the keys of a part and their neighbours, without the global ones, which are packed separately. Returns their
  /// number.
  idx_t pack(const part_of_class& p, const part_scratch& s) const {
    const auto key = head_of(in.k, p.b, p.kv), value = head_of(in.v, p.b, p.kv);
    s.own_keys.keys.positions = {p.r + p.d * p.k0, p.d, nullptr};
    if (p.listed()) {
      s.global_keys.keys.positions = {0, 1, p.globals.data()};
      s.global_keys.pack(key, value, 0, p.globals.before(in.lengths().keys(p.b)));
    }
    const idx_t count = p.keys_to_pack(s.keys.keys.positions);
    s.keys.use_sums(p.sums, 0);
    s.keys.pack(key, value, 0, count);
    if (own())
      s.own_keys.pack(head_of(options.k_global, p.b, p.kv), head_of(options.v_global, p.b, p.kv), 0, p.k1 - p.k0);
    return count;
  }

  T* table_of(const partial& sums, idx_t in_group) const { return sums.tables + in_group * in.table_size(); }
  /// The same by global key, of a query head.
  decay_gradients of_globals(decay_gradients of, const partial& sums, idx_t in_group) const {
    of.keys = sums.decay + in_group * decay_entries() + global_count();
    of.first = 0, of.end = global_count(), of.by_slot = true;
    return of;
  }

  /// Queries [begin, end) of the part's class and head h.
  void differentiate_queries(const part_of_class& p, const part_scratch& s, idx_t h, idx_t begin, idx_t end) const {
    const partial& sums = p.others;
    const auto head_terms = in.forward.terms_for(p.b, h);
    auto back = in.back(head_terms);
    const idx_t in_group = h - p.kv * shape.group();
    back.relative = in.relative_list(sums.relative, in_group);
    decay_gradients decay = in.decay_list(in.sums_of(p.b * shape.heads + h));
    if (decay) decay.keys = p.decay + in_group * slot_count(), decay.end = slot_count(), decay.by_slot = true;
    key_range ranges[max_rows];
    T* const dq = in.dq ? s.dq : nullptr;
    T* const d_relative = in.d_relative_queries ? s.d_relative : nullptr;
    back.by_distance = in.distance_sums(table_of(sums, in_group), dq, d_relative, query_stride());
    back.d_positions = in.position_sums(table_of(sums, in_group));
    const idx_t all = in.lengths().keys(p.b);
    for (idx_t t = begin; t < end; t += max_rows) {
      index_map which;
      const idx_t rows = p.rows_of(t, (std::min)(t + max_rows, end), which);
      in.pack_rows(s.rows, p.b, h, head_of(in.q, p.b, h), which, rows);
      for (idx_t row = 0; row < rows; ++row) {
        const idx_t u = p.entry(which[row]);
        ranges[row] = {p.slot(u - left), p.slot(u + right + 1)};
      }
      for (T* x : {dq, d_relative})
        if (x) std::fill_n(x, max_rows * query_stride(), T(0));
      back.decay = decay;
      differentiate(s.rows, rows, ranges, which, s.keys, head_terms, s.block, dq, query_stride(), back);
      if (p.listed()) {
        for (idx_t row = 0; row < rows; ++row)
          ranges[row] = {0, p.globals.before(in.forward.causal ? (std::min)(all, which[row] + p.shift + 1) : all)};
        if (decay) back.decay = of_globals(decay, sums, in_group);
        differentiate(s.rows, rows, ranges, which, s.global_keys, head_terms, s.block, dq, query_stride(), back);
      }
      const auto store = [&](const T* sums_of, const tensor_view<S>& to, idx_t row) {
        if (to)
          store_gradient_row(sums_of + row * query_stride(), in.terms().scale, head_of(to, p.b, h), which[row],
                             in.accumulate);
      };
      for (idx_t row = 0; row < rows; ++row) store(dq, in.dq, row), store(d_relative, in.d_relative_queries, row);
    }
    sums.slopes[in_group] += back.d_slope();
  }

  /// Rows of global queries of head h with the part's own keys, and with the global ones where `first`.
  void differentiate_global_queries(const part_of_class& p, const part_scratch& s, idx_t h, bool first) const {
    const partial& part = p.others;
    const idx_t in_group = h - p.kv * shape.group();
    T* const sums = part.queries + in_group * global_count() * query_stride();
    const auto head_terms = in.forward.terms_for(p.b, h);
    auto back = in.back(head_terms);
    back.relative = in.relative_list(part.relative, in_group);
    decay_gradients decay = in.decay_list(in.sums_of(p.b * shape.heads + h));
    decay.first = p.r + p.d * p.k0, decay.end = p.r + p.d * p.k1;  // the keys that the part owns
    if (decay) decay.queries = part.decay + in_group * decay_entries(), decay.listed = p.globals.positions;
    key_range ranges[max_rows];
    const idx_t all = in.lengths().keys(p.b);
    const idx_t g0 = p.globals.before(p.shift), g1 = p.globals.before(in.forward.last_shift(p.b));
    const bool wanted = own() ? bool(gradients.q_global) : bool(in.dq);
    T* const dq = wanted ? s.dq : nullptr;
    T* const d_relative = in.d_relative_queries ? s.d_relative : nullptr;
    back.by_distance = in.distance_sums(table_of(part, in_group), dq, d_relative, query_stride());
    back.d_positions = in.position_sums(table_of(part, in_group));
    for (idx_t g = g0; g < g1; g += max_rows) {
      const idx_t rows = (std::min)(max_rows, g1 - g);
      for (idx_t row = 0; row < rows; ++row) p.row_list[row] = p.globals[g + row] - p.shift;
      const index_map which{0, 1, p.row_list};
      in.pack_rows(s.rows, p.b, h, head_of(own() ? options.q_global : in.q, p.b, h), which, rows);
      for (T* x : {dq, d_relative})
        if (x) std::fill_n(x, max_rows * query_stride(), T(0));
      const auto add_set = [&](const backward_keys<P>& set, const decay_gradients& sums_of_set, const auto& range_of) {
        back.decay = sums_of_set;
        for (idx_t row = 0; row < rows; ++row)
          ranges[row] = range_of(in.forward.causal ? (std::min)(all, which[row] + p.shift + 1) : all);
        differentiate(s.rows, rows, ranges, which, set, head_terms, s.block, dq, query_stride(), back);
      };
      const auto entries_before = [&](idx_t end) { return std::clamp(ceil_div(end - p.r, p.d), p.k0, p.k1); };
      if (own())
        add_set(s.own_keys, decay, [&](idx_t end) { return key_range{0, entries_before(end) - p.k0}; });
      else
        add_set(s.keys, decay, [&](idx_t end) { return key_range{p.slot(p.k0), p.slot(entries_before(end))}; });
      if (first && !own())
        add_set(s.global_keys, decay ? of_globals(decay, part, in_group) : decay,
                [&](idx_t end) { return key_range{0, p.globals.before(end)}; });
      for (idx_t row = 0; dq && row < rows; ++row)
        for (idx_t d = 0; d < shape.dim; ++d) sums[(g + row) * query_stride() + d] += dq[row * query_stride() + d];
      T* const of_relative = part.relative_queries + (in_group * global_count() + g) * query_stride();
      for (idx_t x = 0; d_relative && x < rows * query_stride(); ++x) of_relative[x] += d_relative[x];
    }
    part.slopes[in_group] += back.d_slope();
  }

  /// Part `number` of class r of the query heads [h, h_end), with its sums. store_projected(row, sums of dK, sums of
  /// dV) is called for its keys of k_global.
  template <class Store>
  void differentiate_part(part_of_class& p, const part_scratch& s, idx_t h, idx_t h_end, idx_t r, idx_t number,
                 const Store& store_projected) const {
    p.d = dilation(h), p.r = r, p.h = h, p.h_end = h_end, p.number = number;
    const idx_t n = in.lengths().keys(p.b), keys = std::max<idx_t>(0, ceil_div(n - p.r, p.d));
    const idx_t all = parts_of_keys(keys);
    const idx_t end = first_of(in.forward.last_shift(p.b), p.r, p.d);  // of the class's queries
    const idx_t seen_globals = p.globals.before(n);
    p.last = number == all - 1, p.stored = number >= all;
    if (p.stored) return;
    p.k0 = number * keys / all, p.k1 = (number + 1) * keys / all;
    p.low = std::max<idx_t>(0, p.k0 - left);
    p.high = (std::min)(keys, p.k1 + right);
    if (in.forward.exec.invariant()) p.align(this->places());
    const idx_t count = pack(p, s);
    for (idx_t g = 0; in.d_log_decay && g < shape.group(); ++g) std::fill_n(p.decay + g * slot_count(), count, 0.0);

    const idx_t q_first = first_of(p.shift, p.r, p.d);
    const idx_t q1 = p.last ? end : (std::min)(p.k1, end);  // the last part also has the queries beyond the keys
    for (idx_t x = p.h; x < p.h_end; ++x) {
      differentiate_queries(p, s, x, number > 0 ? (std::max)(q_first, p.k0) : q_first, q1);
      if (p.listed()) differentiate_global_queries(p, s, x, p.r == 0 && number == 0);
    }
    p.sums.settle(0, count);
    for (idx_t t = p.k0; own() && t < p.k1; ++t)
      store_projected(p.r + p.d * t, row_of(s.own_keys.d_keys, query_stride(), t - p.k0),
                      row_of(s.own_keys.d_values, value_stride(), t - p.k0));
    for (idx_t x = 0; x < seen_globals * query_stride(); ++x) p.others.keys[x] += s.global_keys.d_keys[x];
    for (idx_t x = 0; x < seen_globals * value_stride(); ++x) p.others.values[x] += s.global_keys.d_values[x];
  }
  static T* row_of(T* rows, idx_t stride, idx_t row) { return rows ? rows + row * stride : nullptr; }

  /// The gradients of scores by key t of a part.
  void add_decay(const part_of_class& p, idx_t t) const {
    for (idx_t h = p.h; in.d_log_decay && h < p.h_end; ++h)
      in.decay_list(in.sums_of(p.b * shape.heads + h)).keys[p.r + p.d * t] +=
          p.decay[(h - p.kv * shape.group()) * slot_count() + p.slot(t)];
  }

  /// Stores the gradients of keys that no later part sees, from the sums of a part and of the part before it.
  void store_keys(const part_of_class& before, const part_of_class& p) const {
    if (p.stored) return;
    const bool first = p.number == 0;
    const idx_t begin = p.number > 1 ? before.k0 + right : 0, end = p.last ? p.k1 : first ? 0 : p.k0 + right;
    const auto add_row = [](T* to, const T* from, idx_t size) {
      for (idx_t x = 0; to && x < size; x += width<T>) store<T>(to + x, add(load<T>(to + x), load<T>(from + x)));
    };
    for (idx_t t = begin; t < end; ++t) {
      const idx_t row = p.r + p.d * t;
      if (p.globals.contains(row)) continue;
      const bool after = t >= p.low, both = after && !first && t < before.high;
      const part_of_class& of = !after || both ? before : p;
      T* const key = row_of(of.sums.d_keys, query_stride(), of.slot(t));
      T* const value = row_of(of.sums.d_values, value_stride(), of.slot(t));
      add_decay(of, t);
      if (both) {
        add_row(key, row_of(p.sums.d_keys, query_stride(), p.slot(t)), query_stride());
        add_row(value, row_of(p.sums.d_values, value_stride(), p.slot(t)), value_stride());
        add_decay(p, t);
      }
      store_key(false, p.b, p.kv, row, key, value);
    }
  }

  /// Row of k and v, or of k_global and v_global; sums that are null are 0.
  void store_key(bool projected, idx_t b, idx_t kv, idx_t row, const T* d_key, const T* d_value) const {
    const auto &dk = projected ? gradients.k_global : in.dk, &dv = projected ? gradients.v_global : in.dv;
    if (dk) store_gradient_row(d_key, in.terms().scale, head_of(dk, b, kv), row, in.accumulate);
    if (dv) store_gradient_row(d_value, T(1), head_of(dv, b, kv), row, in.accumulate);
  }

  /// Task `step` of a key head: one part of all its query heads, or all parts of one query head after the other.
  void differentiate_task(part_of_class& p, idx_t key_head, idx_t step, int worker) const {
    const idx_t b = p.b = key_head / shape.kv_heads, kv = p.kv = key_head % shape.kv_heads, group = shape.group(),
                h0 = kv * group;
    p.shift = in.forward.shift(b), p.globals = globals(b), p.stored = true;
    p.others.clear();
    if (step >= steps(kv)) return;
    const bool alone = !one_dilation(kv);
    const part_scratch s = in.forward.exec.scratch(worker, [&](arena& memory) { return layout(memory, alone); });
    if (!alone) {
      const idx_t each = parts_of_class(h0);
      return differentiate_part(
          p, s, h0, h0 + group, step / each, step % each,
          [&](idx_t row, const T* d_key, const T* d_value) { store_key(true, b, kv, row, d_key, d_value); });
    }
    for (const key_sums& x : {s.ordinary, s.projected}) {
      if (x.keys) std::fill_n(x.keys, shape.keys * query_stride(), T(0));
      if (x.values) std::fill_n(x.values, shape.keys * value_stride(), T(0));
    }
    const auto add_to = [&](const key_sums& sums, idx_t row, const T* d_key, const T* d_value) {
      T *const key = sums.keys + row * query_stride(), *const value = sums.values + row * value_stride();
      for (idx_t d = 0; d_key && d < shape.dim; ++d) key[d] += d_key[d];
      for (idx_t d = 0; d_value && d < shape.dim_v; ++d) value[d] += d_value[d];
    };
    for (idx_t h = h0; h < h0 + group; ++h)
      for (idx_t n = 0, each = parts_of_class(h); n < parts(h); ++n) {
        differentiate_part(
            p, s, h, h + 1, n / each, n % each,
            [&](idx_t row, const T* d_key, const T* d_value) { add_to(s.projected, row, d_key, d_value); });
        if (std::exchange(p.stored, true)) continue;
        for (idx_t t = p.low; t < p.high; ++t) {
          if (p.globals.contains(p.r + p.d * t)) continue;
          add_to(s.ordinary, p.r + p.d * t, row_of(p.sums.d_keys, query_stride(), p.slot(t)),
                 row_of(p.sums.d_values, value_stride(), p.slot(t)));
          add_decay(p, t);
        }
      }
    for (const bool projected : {false, true})
      for (idx_t row = 0; (own() || !projected) && row < in.lengths().keys(b); ++row)
        if (projected || !p.globals.contains(row)) {
          const key_sums& sums = projected ? s.projected : s.ordinary;
          store_key(projected, b, kv, row, row_of(sums.keys, query_stride(), row),
                    row_of(sums.values, value_stride(), row));
        }
  }

  /// Stores the sums that all parts of a key head left, and zeros for rows that no part has.
  void finish(idx_t key_head, const partial& sums) const {
    const idx_t b = key_head / shape.kv_heads, kv = key_head % shape.kv_heads, n = in.lengths().keys(b);
    const global_list global = globals(b);
    const idx_t shift = in.forward.shift(b), seen_globals = global.before(n);
    const idx_t g0 = global.before(shift), g1 = global.before(in.forward.last_shift(b));  // of the queries
    for (idx_t g = 0; g < seen_globals; ++g)
      store_key(false, b, kv, global[g], sums.keys + g * query_stride(), sums.values + g * value_stride());
    for (idx_t row = n; row < shape.keys; ++row)
      for (int projected = 0; projected < 1 + own(); ++projected) store_key(projected, b, kv, row, nullptr, nullptr);
    for (idx_t in_group = 0; in_group < shape.group(); ++in_group) {
      const idx_t h = kv * shape.group() + in_group;
      const T* const queries = sums.queries + in_group * global_count() * query_stride();
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
        store(in.d_relative_queries, i, sums.relative_queries + (in_group * global_count() + g) * query_stride());
      }
      in.add_table(b * shape.heads + h, table_of(sums, in_group));
      if (in.d_slopes) in.slope_sums[b * shape.heads + h] += sums.slopes[in_group];
      in.add_sums(b * shape.heads + h, sums.relative + in_group * in.relative_entries(), in.relative_entries());
      if (const decay_gradients to = in.decay_list(in.sums_of(b * shape.heads + h))) {
        const double *const of_queries = sums.decay + in_group * decay_entries(),
                     *const of_keys = of_queries + global_count();
        for (idx_t g = g0; g < g1; ++g) to.queries[global[g] - shift] += of_queries[g];
        for (idx_t g = 0; g < seen_globals; ++g) to.keys[global[g]] += of_keys[g];
      }
    }
  }

  void run() const {
    execution& exec = in.forward.exec;
    idx_t most_steps = 1;
    for (idx_t kv = 0; kv < shape.kv_heads; ++kv) most_steps = (std::max)(most_steps, steps(kv));
    const idx_t heads = shape.batch * shape.kv_heads, all = heads * most_steps, threads = exec.active_threads();
    const idx_t size = (std::min)(all, threads == 1 ? 1 : 3 * threads);
    // Those of a wave, and before them the last of the wave before.
    part_of_class* const wave = exec.shared_scratch(
        [&](arena& memory) { return memory.allocate_list(size + 1, [&](arena& m) { return layout_part(m); }); });
    for (idx_t first = 0; first < all; first += size) {
      const idx_t count = (std::min)(size, all - first), head = first / most_steps, step = first % most_steps;
      exec.for_each(count, [&](idx_t n, int worker) {
        differentiate_task(wave[n + 1], (first + n) / most_steps, (first + n) % most_steps, worker);
      });
      exec.for_each(count + ceil_div(step + count, most_steps), [&](idx_t task, int) {
        if (task < count) return store_keys(wave[task], wave[task + 1]);
        // What the parts of a key head leave is added to what the part before has.
        const idx_t key_head = head + task - count, from = key_head * most_steps - first, end = from + most_steps;
        for (idx_t n = std::max<idx_t>(from + 1, 0); n < (std::min)(end, count); ++n)
          wave[n + 1].others.add(wave[n].others);
        if (end <= count) finish(key_head, wave[end].others);
      });
      std::swap(wave[0], wave[count]);
    }
  }
};

template <class S, class Score, class ScoreBackward>
void run_sliding_window_backward(softmax_backward_call<S, Score, ScoreBackward>& call,
                                 const sliding_window_options<S>& options,
                                 const sliding_window_gradients<S>& gradients) {
  if (call.forward.exec.invariant() && !options.global_positions.empty())
    call.forward.check.fail("no global_positions, since the execution is invariant", "some");
  sliding_window_backward_driver<S, Score, ScoreBackward> driver{
      {window_sets::of(call.shape, options), call, options, gradients}};
  if (options.global_positions.empty()) {
    call.steps = options.dilation;
    idx_t widest = 1;
    for (idx_t h = 0; h < call.shape.heads; ++h) widest = (std::max)(widest, driver.dilation(h));
    const idx_t most = (std::max)(driver.left, driver.right);
    if (most <= call.furthest / widest) call.furthest = most * widest;
  }
  const auto lists = call.forward.exec.workspace([&](arena& memory) { return global_lists::layout(memory, options); });
  driver.globals = lists->set(options);
  const double seen =
      static_cast<double>((std::min)(driver.left + driver.right + 1 + 2 * driver.globals.most, call.shape.keys));
  softmax_backward_work work(
      call, 2.5 * call.shape.operations_per_score() * static_cast<double>(call.shape.queries) * seen);
  if (work.needs_lse()) run_sliding_window(call.forward, options);
  driver.run();
  work.store_parameters();
}

}}}  // namespace attn::ATTN_ISA::detail
