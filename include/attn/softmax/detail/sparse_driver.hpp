// attn: the driver of sparse attention. It takes waves of key heads, or of query heads where each has keys of its own,
// as their plan (row_plan.hpp) says:
//     1. keys and values that several query sets see are packed once, pack_step at a time; the plan prepares its tables
//     2. stage by stage, for every query set: pack its other keys; for every block of its rows, for every set of keys:
//        attend. The states of rows are stored between one stage and the next
#pragma once

#include <attn/core/detail/prefetch.hpp>
#include <attn/core/detail/waves.hpp>
#include <attn/softmax/detail/row_plan.hpp>
#include <attn/softmax/detail/row_states.hpp>
#include <attn/softmax/detail/softmax_call.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// visit(keys, seen_keys, seen) for every set of keys of a query set; they are packed in `shared`, or to be packed one
/// after the other in `own`. Keys is packed_keys or backward_keys.
template <class Plan, class Keys, class Visit>
void for_each_key_set(const Plan& plan, const typename Plan::head& h, const query_set& set,
                      const typename Plan::thread_scratch& s, const Keys& shared, const Keys& own, const Visit& visit) {
  idx_t used = 0;
  plan.keys(h, set, s, [&](const seen_keys& given, const auto& seen) {
    if (given.in_place) return visit(Keys(shared), given, seen);
    visit(own.from(used, given.positions), given, seen);
    used += round_up(given.slot_count, Keys::wide);
  });
}

/// body(which, rows, row) for the blocks of rows of a query set: rows [row, row + rows) of it, which[...] of q.
template <class Body>
void for_each_row_block(const query_set& set, const Body& body) {
  const idx_t step = round_up(ceil_div(set.unit, ceil_div(set.unit, max_rows)), tile_rows);
  for (idx_t row = 0, end; row < set.count; row = end) {
    end = (std::min)({row + step, row + set.unit - row % set.unit, set.count});
    body(set.rows.from(row), end - row, row);
  }
}

/// Packs the keys of key heads [first, first + count) that their query sets read in place, in scratch[n].keys.
template <class Plan, class Wave, class Pack>
void pack_shared(const Plan& plan, const Wave& key_heads, const attention_shape& shape, const sequence_lengths& lengths,
                 const Pack& pack) {
  for (idx_t n = 0; n < key_heads.count; ++n) plan.mark_needed(key_heads.first + n, key_heads.scratch[n].needed);
  key_heads.for_each(ceil_div(shape.keys, Plan::pack_step), [&](idx_t key_head, const auto& p, idx_t step, int) {
    const idx_t b = key_head / shape.kv_heads, begin = step * Plan::pack_step,
                end = (std::min)(begin + Plan::pack_step, lengths.keys(b));
    if (begin < end && p.needed[step]) pack(p.keys, b, key_head % shape.kv_heads, begin, end);
  });
}

/// Whether rows are stored between query sets.
template <class Plan>
bool stores_rows(const Plan& plan) {
  return plan.stages() > 1 || plan.several_sets();
}

template <class S, class Score, class Plan, class P = product_type<S>>
struct sparse_driver {
  using T = compute_type<S>;
  using head = typename Plan::head;

  const softmax_call<S, Score>& in;
  const Plan& plan;
  const attention_shape& shape = in.shape;

  /// Query heads of an item of a wave.
  idx_t together() const { return Plan::keys_are_queries ? 1 : shape.group(); }

  /// Memory that all threads share for one item.
  struct item_scratch {
    typename Plan::item_scratch plan;
    packed_keys<P> keys;    // where keys are packed once for all query sets
    bool* needed;           // per pack_step keys
    row_states<T>* states;  // per query head, where rows are stored
  };
  item_scratch layout(arena& memory) const {
    item_scratch p{.plan = plan.layout(memory, together()), .keys = {}, .needed = nullptr, .states = nullptr};
    if (plan.shared()) {
      p.keys = packed_keys<P>::layout(memory, shape.keys, shape.dim, shape.dim_v);
      p.keys.positions = plan.shared_positions();
      p.needed = memory.allocate<bool>(ceil_div(shape.keys, plan.pack_step));
    }
    if (stores_rows(plan))
      p.states = memory.allocate_list(
          together(), [&](arena& m) { return row_states<T>::layout(m, in.out, plan.keeps_errors()); });
    return p;
  }

  /// Scratch of one thread: a block of rows, and the keys a query set packs.
  struct thread_scratch {
    row_block<P> rows;
    packed_keys<P> keys;
    typename Plan::thread_scratch plan;
  };
  thread_scratch scratch(int worker) const {
    return in.exec.scratch(worker, [&](arena& memory) {
      return thread_scratch{.rows = row_block<P>::layout(memory, shape.dim, shape.dim_v),
                            .keys = packed_keys<P>::layout(memory, plan.capacity(), shape.dim, shape.dim_v),
                            .plan = plan.layout_scratch(memory)};
    });
  }

  void attend_set(const head& h, const query_set& set, const packed_keys<P>& shared, const row_states<T>& states,
                  const thread_scratch& s) const {
    if (set.count == 0) return;
    const idx_t b = h.batch;
    const head_rows<S> x{in.query(b, h.head), in.key(b, h.head), in.value(b, h.head), in.result(b, h.head)};
    const auto visit_keys = [&](const auto& visit) { for_each_key_set(plan, h, set, s.plan, shared, s.keys, visit); };
    visit_keys([&](packed_keys<P> keys, const seen_keys& given, const auto&) {
      if (!given.in_place) keys.pack(plan.key_rows(h, x.key, s.plan), x.value, 0, given.slot_count);
    });
    const matrix_view<T> stored{states.out, states.rows, states.cols, states.stride, 1};
    row_block<P> rows = s.rows;
    auto terms = in.terms_for(b, h.head);
    for_each_row_block(set, [&](const index_map& which, idx_t count, idx_t row) {
      rows.begin(x.query, which, count, in.terms.query_factor());
      const bool accumulates = plan.accumulates();
      if (!set.first) accumulates ? states.resume_maxima(rows) : states.resume(rows);
      long_row_sums<P> sums = rows.sums();
      if (accumulates) sums.begin();
      bool prefetched = false;
      line_prefetcher next;  // by the products with keys in place
      if (plan.shared()) plan.add_next(h, set, row, count, x, next);
      if (plan.shared() && !which.list && which.step == 1) next.add(x.result, which.first, which.first + count);
      visit_keys([&](packed_keys<P> keys, const seen_keys& given, const auto& seen) {
        if (given.in_place) keys.next = &next;
        for (idx_t r = 0; r < count; ++r) rows.ranges[r] = seen(row + r);
        terms.excluded = given.excluded;
        const auto prefetch = [&](idx_t r, idx_t n) {
          if (!Plan::prefetches || prefetched || given.in_place) return;
          plan.prefetch_next(h, set, row + r, n, x);
          for (idx_t i = r; i < r + n; ++i)
            if (set.first && set.last)
              prefetch_row(x.result, which[i]);
            else
              prefetch_row(stored, which[i]);
          prefetched = r + n == count;
        };
        attend(rows, keys, terms, prefetch, accumulates ? &sums : nullptr);
      });
      sums.finish();
      if (!set.first && accumulates)
        states.resume_sums(rows, set.last);
      else if (set.first && !set.last)
        states.clear_errors(rows);
      if (!set.last) return states.save(rows);
      plan.complete(h, rows, in.terms, x);
      in.finish(rows, b, h.head);
    });
  }

  void attend_wave(const wave<item_scratch>& items) const {
    const idx_t all = together();
    if (plan.shared())
      pack_shared(plan, items, shape, in.lengths, [&](packed_keys<P> keys, idx_t b, idx_t kv, idx_t begin, idx_t end) {
        keys.pack(head_of(in.k, b, kv), head_of(in.v, b, kv), begin, end);
      });
    plan.prepare(0, all, [&](idx_t steps, const auto& body) {
      items.for_each(steps, [&](idx_t n, const item_scratch& p, idx_t step, int worker) {
        body(n * all, p.plan, step, scratch(worker).plan);
      });
    });
    for (idx_t stage = 0; stage < plan.stages(); ++stage)
      items.for_each(plan.tasks(stage, items.first * all, items.count * all) * all,
                     [&](idx_t n, const item_scratch& p, idx_t step, int worker) {
                       const idx_t in_group = step % all;
                       const head h = plan.head_at(n * all + in_group, p.plan, in_group);
                       const thread_scratch s = scratch(worker);
                       const row_states<T> states =
                           p.states ? p.states[in_group].of(in.out, h.batch, h.head) : row_states<T>{};
                       plan.sets(h, stage, step / all, s.plan,
                                 [&](const query_set& set) { attend_set(h, set, p.keys, states, s); });
                     });
    items.for_each(all, [&](idx_t n, const item_scratch&, idx_t in_group, int) {
      in.clear_padding((n * all + in_group) / shape.heads, (n * all + in_group) % shape.heads);
    });
  }

  void run() const {
    execution& exec = in.exec;
    const auto limit = exec.limit_threads({.operations = plan.operations(2 * (shape.dim + shape.dim_v))});
    const idx_t items = shape.batch * shape.heads / std::max<idx_t>(1, together()),
                bytes = plan.numbers(shape) * static_cast<idx_t>(sizeof(T));
    for (const auto& w :
         waves_of(exec, items, wave_size(exec, items, bytes), [&](arena& memory) { return layout(memory); }))
      attend_wave(w);
  }
};

/// Attends the call as its plan says.
template <class S, class Score, class Plan>
void run_plan(const softmax_call<S, Score>& call, const Plan& plan) {
  with_products<S>(call.exec, [&]<class P>(std::type_identity<P>) {
    sparse_driver<S, Score, Plan, P>{call, plan}.run();
  });
}

}}}  // namespace attn::ATTN_ISA::detail
