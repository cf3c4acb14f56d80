// attn: the driver of the gradients of sparse attention. It takes waves of key heads, query head by query head, as
// their plan (row_plan.hpp) says:
//   1. keys and values that several query sets see are packed once; the plan prepares its tables
//   2. stage by stage, with the final lse: the query sets, divided into tasks with separate sums of dK and dV; sums of
//      contiguous keys are added in place, those of other keys at the end of the query set. dQ is stored between stages
//   3. the sums of all tasks are added in order and stored
// Where there are at least twice as many threads as tasks, a task is two or three, each with some of the sums alone:
// they compute scores again, but all sums as before.
#pragma once

#include <attn/softmax/detail/softmax_backward_call.hpp>
#include <attn/softmax/detail/sparse_driver.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <class S, class Score, class ScoreBackward, class Plan>
struct sparse_backward {
  using T = compute_type<S>;
  using P = product_type<S>;
  using head = typename Plan::head;
  static constexpr idx_t pack_step = Plan::pack_step;

  const softmax_backward_call<S, Score, ScoreBackward>& in;
  const Plan& plan;
  const attention_shape& shape = in.shape;
  idx_t sides = 1;  // tasks of each part: dQ | dK | dV, or dQ and dK | dV

  idx_t stride_k() const { return backward_keys<P>::stride(shape.dim); }
  idx_t stride_v() const { return backward_keys<P>::stride(shape.dim_v); }
  /// A set of keys that does not begin at a panel may reach beyond the last key by less than a vector.
  idx_t slot_count() const { return slot_count(shape.keys); }
  idx_t slot_count(idx_t keys) const { return round_up(keys, panel_width<T>) + (Plan::at_panels ? 0 : panel_width<T>); }
  idx_t steps() const { return ceil_div(shape.keys, pack_step); }
  /// Where keys are made from queries, their gradients become gradients of these.
  bool want_keys() const { return Plan::keys_are_queries ? bool(in.dq) : bool(in.dk); }
  idx_t most_tasks() const {
    idx_t most = Plan::keys_are_queries ? steps() : 0;
    for (idx_t phase = 0; phase < plan.phases(); ++phase) most = (std::max)(most, plan.part_tasks(phase));
    return most;
  }
  head_rows<S> rows_of(const head& h) const {
    return {head_of(in.q, h.batch, h.head), head_of(in.k, h.batch, h.head / shape.group()),
            head_of(in.v, h.batch, h.head / shape.group())};
  }

  /// Memory that all threads share for one key head of one batch item.
  struct item_scratch {
    typename Plan::item_scratch plan;  // of the query head in progress
    backward_keys<P> keys;             // where keys are packed once; sums of all keys, [parts][slot_count()]
    bool *needed, *begun;              // per pack_step keys; [sides][parts][slot_count()]: whether sums were begun
    T* dq;                             // [Lq][stride_k()], where rows are stored: sums of query sets that are done,
    T* dq_errors;                      // and, of many, what these lost
    T* slopes;                         // [tasks]: their sums of the gradient of the slope
    double* relative;                  // [tasks]: those of the relative bias
  };
  idx_t begun_size() const { return sides * plan.parts() * slot_count(); }
  item_scratch layout(arena& memory) const {
    const bool errors = many_queries(shape.queries) && !Plan::keys_are_queries;
    item_scratch p{.plan = plan.layout(memory, 1),
                   .keys = layout_keys(memory, plan.shared() ? shape.keys : 0, plan.parts() * slot_count(), errors),
                   .needed = memory.allocate<bool>(plan.shared() ? steps() : 0),
                   .begun = memory.allocate<bool>(begun_size()), .dq = nullptr,
                   .dq_errors = nullptr, .slopes = memory.allocate<T>(most_tasks()),
                   .relative = memory.allocate<double>(most_tasks() * in.relative_entries())};
    p.keys.keys.positions = plan.shared_positions();
    const bool stages = in.dq && (stores_rows(plan) || Plan::keys_are_queries);
    if (stages) p.dq = memory.allocate<T>(shape.queries * stride_k());
    if (stages && plan.keeps_errors()) p.dq_errors = memory.allocate<T>(shape.queries * stride_k());
    return p;
  }
  /// Memory for so many keys, and for so many sums.
  backward_keys<P> layout_keys(arena& memory, idx_t count, idx_t sums, bool errors = false) const {
    auto keys = backward_keys<P>::layout(memory, count, shape.dim, shape.dim_v, false, false);
    keys.layout_sums(memory, sums, want_keys(), bool(in.dv), errors);
    return keys;
  }

  /// Scratch of one thread: a block of rows, and the keys a query set packs, with the sums of those not contiguous.
  struct thread_scratch {
    backward_rows<P> rows;
    backward_scratch<P> kernel;
    backward_keys<P> keys;
    key_range* ranges;  // [max_rows]
    T* dq;              // [max_rows][stride_k()]
    typename Plan::thread_scratch plan;
  };
  thread_scratch scratch(int worker) const {
    return in.forward.exec.scratch(worker, [&](arena& memory) {
      return thread_scratch{.rows = backward_rows<P>::layout(memory, max_rows, shape.dim, shape.dim_v),
                            .kernel = in.layout_scratch(memory),
                            .keys = layout_keys(memory, plan.capacity(), plan.listed_capacity()),
                            .ranges = memory.allocate<key_range>(max_rows),
                            .dq = in.dq ? memory.allocate<T>(max_rows * stride_k()) : nullptr,
                            .plan = plan.layout_scratch(memory)};
    });
  }

  /// The keys that all query sets of a task share, with the sums of the task.
  struct task_keys {
    backward_keys<P> keys;
    bool* begun;
  };

  /// visit(keys, seen_keys, seen) for every set of keys, with its sums.
  template <class Visit>
  void visit_keys(const head& h, const query_set& set, const backward_keys<P>& shared, const thread_scratch& s,
                  const Visit& visit) const {
    idx_t summed = 0;
    for_each_key_set(plan, h, set, s.plan, shared, s.keys, [&](backward_keys<P> keys, const seen_keys& given,
                                                               const auto& seen) {
      if (!given.contiguous())
        keys.use_sums(s.keys, std::exchange(summed, summed + round_up(given.slot_count, panel_width<T>)));
      else if (!given.in_place)
        keys.use_sums(shared, given.positions.first);
      visit(keys, given, seen);
    });
  }

  /// visit(first, end) for the longest ranges of [begin, end) whose sums were begun, or were not.
  template <class Visit>
  static void for_each_range(const bool* begun, bool which, idx_t begin, idx_t end, const Visit& visit) {
    const bool* const last = begun + end;
    for (const bool *from = begun + begin, *to; (from = std::find(from, last, which)) != last; from = to)
      visit(from - begun, (to = std::find(from, last, !which)) - begun);
  }

  /// Call before adding to sums of keys [begin, end).
  static void begin_sums(const task_keys& of, idx_t begin, idx_t end) {
    for_each_range(of.begun, false, begin, end, [&](idx_t from, idx_t to) { of.keys.clear_rows(from, to); });
    std::fill(of.begun + begin, of.begun + end, true);
  }

  /// Adds sums of a query set to those of all keys, where these were begun.
  static void scatter(T* sums, idx_t stride, const seen_keys& given, T* to, T* errors, const bool* begun) {
    for (idx_t n = 0; sums && n < given.slot_count; ++n) {
      const idx_t key = given.positions[n], at = key * stride;
      T* const from = sums + n * stride;
      if (errors) {
        if (!begun[key])
          for (T* x : {to, errors}) std::fill_n(x + at, stride, T(0));
        move_compensated(from, stride, T(1), to + at, errors + at);
      } else if (!begun[key]) {
        for (idx_t d = 0; d < stride; d += width<T>) store<T>(to + at + d, load<T>(from + d));
      } else {
        for (idx_t d = 0; d < stride; d += width<T>)
          store<T>(to + at + d, add(load<T>(to + at + d), load<T>(from + d)));
      }
    }
  }

  template <class Terms, class Back>
  void differentiate_set(const head& h, const query_set& set, const item_scratch& p, const task_keys& of,
                         const thread_scratch& s, Terms& terms, Back& back) const {
    if (set.count == 0) return;
    const head_rows<S> x = rows_of(h);
    visit_keys(h, set, of.keys, s, [&](backward_keys<P> keys, const seen_keys& given, const auto&) {
      if (!given.in_place) keys.fill(plan.key_rows(h, x.key, s.plan), x.value, 0, given.slot_count);
      if (!given.contiguous()) return keys.clear(0, given.slot_count);
      // The kernel adds to whole vectors of keys.
      begin_sums(of, given.positions.first / width<T> * width<T>,
                 (std::min)(round_up(given.positions.first + given.slot_count, width<T>), slot_count()));
    });
    for_each_row_block(set, [&](const index_map& which, idx_t count, idx_t row) {
      in.pack_rows(s.rows, h.batch, h.head, x.query, which, count);
      if (s.dq) begin_rows(set, which, count, p, s.dq);
      visit_keys(h, set, of.keys, s, [&](const backward_keys<P>& keys, const seen_keys& given, const auto& seen) {
        for (idx_t r = 0; r < count; ++r) s.ranges[r] = seen(row + r);
        terms.excluded = given.excluded;
        differentiate(s.rows, count, s.ranges, which, keys, terms, s.kernel, s.dq, stride_k(), back);
      });
      if (s.dq) end_rows(h, set, which, count, s.dq, p);
    });
    visit_keys(h, set, of.keys, s, [&](const backward_keys<P>& keys, const seen_keys& given, const auto&) {
      if (given.contiguous()) return;
      scatter(keys.d_keys, stride_k(), given, of.keys.d_keys, of.keys.key_errors, of.begun);
      scatter(keys.d_values, stride_v(), given, of.keys.d_values, of.keys.value_errors, of.begun);
      for (idx_t n = 0; n < given.slot_count; ++n) of.begun[given.positions[n]] = true;
    });
  }

  /// The sums of dQ of a block of rows: 0, or those of the stages that are done. Of many stages they are added at the
  /// end, with what they lose.
  void begin_rows(const query_set& set, const index_map& which, idx_t count, const item_scratch& p, T* dq) const {
    std::fill_n(dq, round_up(count, tile_rows) * stride_k(), T(0));
    for (idx_t r = 0; !set.first && !p.dq_errors && r < count; ++r)
      std::copy_n(p.dq + which[r] * stride_k(), stride_k(), dq + r * stride_k());
  }
  void end_rows(const head& h, const query_set& set, const index_map& which, idx_t count, T* dq,
                const item_scratch& p) const {
    const bool last = set.last && !Plan::keys_are_queries;
    for (idx_t r = 0; r < count; ++r, dq += stride_k()) {
      const idx_t at = which[r] * stride_k();
      if (p.dq_errors) {
        if (set.first)
          for (T* x : {p.dq, p.dq_errors}) std::fill_n(x + at, stride_k(), T(0));
        move_compensated(dq, stride_k(), T(1), p.dq + at, p.dq_errors + at);
        if (last) settle_compensated(p.dq + at, p.dq_errors + at, stride_k(), dq);
      }
      if (last)
        store_gradient_row(dq, in.terms().scale, head_of(in.dq, h.batch, h.head), which[r], in.accumulate);
      else if (!p.dq_errors)
        std::copy_n(dq, stride_k(), p.dq + at);
    }
  }

  /// One task of a stage of query head `in_group` of a key head.
  void differentiate_task(idx_t key_head, idx_t in_group, idx_t stage, idx_t phase, idx_t task, idx_t side,
                          const item_scratch& p, int worker) const {
    const head h = plan.head_at(key_head * shape.group() + in_group, p.plan, 0);
    const idx_t part = plan.parts() > 1 && !plan.disjoint(stage) ? task : 0;
    const bool of_rows = side == 0, of_values = side == sides - 1, of_keys = sides < 3 ? of_rows : side == 1;
    task_keys of{p.keys, p.begun + (part + side * plan.parts()) * slot_count()};
    of.keys.use_sums(p.keys, part * slot_count());
    auto terms = in.forward.terms_for(h.batch, h.head);
    auto back = in.back(terms);
    if (of_rows) back.relative = in.relative_list(p.relative, task);
    thread_scratch s = scratch(worker);
    for (backward_keys<P>* keys : {&of.keys, &s.keys}) {
      if (!of_keys) keys->d_keys = keys->key_errors = nullptr;
      if (!of_values) keys->d_values = keys->value_errors = nullptr;
    }
    if (!of_rows) s.dq = nullptr;
    plan.part_sets(h, stage, phase, task, s.plan,
                   [&](const query_set& set) { differentiate_set(h, set, p, of, s, terms, back); });
    if (of_rows) p.slopes[task] += back.d_slope();
  }

  /// Before the first stage of a query head. Sums are cleared when they are begun, or all of them here, if tasks share
  /// them; those of keys that are queries for every query head.
  void begin_head(const wave<item_scratch>& key_heads, idx_t in_group) const {
    for (idx_t n = 0; n < key_heads.count; ++n) {
      std::fill_n(key_heads.scratch[n].slopes, most_tasks(), T(0));
      std::fill_n(key_heads.scratch[n].relative, most_tasks() * in.relative_entries(), 0.0);
      if (in_group == 0) std::fill_n(key_heads.scratch[n].begun, begun_size(), false);
    }
    if constexpr (Plan::keys_are_queries)
      key_heads.for_each(steps(), [&](idx_t key_head, const item_scratch& p, idx_t step, int) {
        task_keys of{p.keys, p.begun};
        if (in_group > 0) of.keys.d_values = nullptr;
        const idx_t keys = in.lengths().keys(key_head / shape.kv_heads), begin = step * pack_step,
                    end = (std::min)(begin + pack_step, slot_count(keys));
        if (begin >= end) return;
        std::fill(of.begun + begin, of.begun + end, false);
        begin_sums(of, begin, end);
      });
  }

  /// Stores the gradients of the keys of a step, from the sums of all parts.
  void store_step(idx_t key_head, const item_scratch& p, idx_t step) const {
    const idx_t b = key_head / shape.kv_heads, keys = in.lengths().keys(b), begin = step * pack_step,
                end = (std::min)(begin + pack_step, shape.keys), real = (std::min)(end, keys);
    begin_sums({p.keys, p.begun}, begin, (std::max)(begin, real));
    for (idx_t part = 1; part < plan.parts(); ++part)
      for_each_range(p.begun + part * slot_count(), true, begin, (std::max)(begin, real), [&](idx_t from, idx_t to) {
        p.keys.settle(part * slot_count() + from, part * slot_count() + to);
        if (p.keys.d_keys)
          sums_in_parts<T>{p.keys.d_keys, plan.parts(), slot_count(), stride_k()}.add_part(part, from, to);
        if (in.dv) sums_in_parts<T>{p.keys.d_values, plan.parts(), slot_count(), stride_v()}.add_part(part, from, to);
      });
    p.keys.store(in.dk, in.dv, b, key_head % shape.kv_heads, begin, end, keys, in.terms().scale, in.accumulate);
  }

  void differentiate_wave(const wave<item_scratch>& key_heads) const {
    const idx_t group = shape.group();
    if (plan.shared())
      pack_shared(plan, key_heads, shape, in.lengths(),
                  [&](backward_keys<P> keys, idx_t b, idx_t kv, idx_t begin, idx_t end) {
                    keys.fill(head_of(in.k, b, kv), head_of(in.v, b, kv), begin, end);
                  });
    for (idx_t in_group = 0; in_group < group; ++in_group) {
      plan.prepare(in_group, 1, [&](idx_t all, const auto& body) {
        key_heads.for_each(all, [&](idx_t key_head, const item_scratch& p, idx_t step, int worker) {
          body(key_head * group, p.plan, step, scratch(worker).plan);
        });
      });
      begin_head(key_heads, in_group);
      for (idx_t stage = 0; stage < plan.stages(); ++stage)
        for (idx_t phase = 0; phase < plan.phases(); ++phase)
          key_heads.for_each(sides * plan.part_tasks(phase),
                             [&](idx_t x, const item_scratch& p, idx_t step, int worker) {
                               const idx_t tasks = plan.part_tasks(phase);
                               differentiate_task(x, in_group, stage, phase, step % tasks, step / tasks, p, worker);
                             });
      if constexpr (Plan::keys_are_queries)
        key_heads.for_each(steps(), [&](idx_t key_head, const item_scratch& p, idx_t step, int) {
          p.slopes[step] += plan.finish(in, plan.head_at(key_head * group + in_group, p.plan, 0), p.keys, p.dq,
                                        step * pack_step, (std::min)((step + 1) * pack_step, shape.keys));
        });
      for (idx_t n = 0; in.d_slopes && n < key_heads.count; ++n)
        for (idx_t task = 0; task < most_tasks(); ++task)
          in.slope_sums[(key_heads.first + n) * group + in_group] += key_heads.scratch[n].slopes[task];
      for (idx_t n = 0; in.d_relative_bias && n < key_heads.count; ++n)
        for (idx_t task = 0, size = in.relative_entries(); task < most_tasks(); ++task)
          in.add_sums((key_heads.first + n) * group + in_group, key_heads.scratch[n].relative + task * size, size);
    }
    if (in.dk || in.dv)
      key_heads.for_each(steps(), [&](idx_t key_head, const item_scratch& p, idx_t step, int) {
        store_step(key_head, p, step);
      });
  }

  void run() {
    if (!in.dq && !in.dk && !in.dv && !in.d_slopes && !in.d_relative_bias) return;
    execution& exec = in.forward.exec;
    const idx_t key_heads = shape.batch * shape.kv_heads,
                bytes = 3 * shape.keys * (shape.dim + shape.dim_v) * static_cast<idx_t>(sizeof(T));
    if (!Plan::keys_are_queries && in.dq && in.dk && in.dv) {
      const idx_t tasks = key_heads * (std::min)(plan.busy_tasks(), plan.part_tasks(0));
      sides = std::clamp<idx_t>(exec.active_threads() / std::max<idx_t>(1, tasks), 1, 3);
    }
    for (const auto& w :
         waves_of(exec, key_heads, wave_size(exec, key_heads, bytes), [&](arena& memory) { return layout(memory); }))
      differentiate_wave(w);
    for (idx_t b = 0; in.dq && !in.accumulate && b < shape.batch; ++b)
      for (idx_t h = 0; h < shape.heads; ++h) clear_rows(head_of(in.dq, b, h), in.lengths().queries(b), shape.queries);
  }
};

/// The gradients of a call as its plan says.
template <class S, class Score, class ScoreBackward, class Plan>
void run_plan_backward(softmax_backward_call<S, Score, ScoreBackward>& call, const Plan& plan) {
  softmax_backward_work work(call, plan.operations(6 * call.shape.dim + 4 * call.shape.dim_v));
  if (work.needs_lse()) sparse_driver<S, Score, Plan>{call.forward, plan}.run();
  sparse_backward<S, Score, ScoreBackward, Plan>{call, plan}.run();
  work.store_parameters();
}

}}}  // namespace attn::ATTN_ISA::detail
