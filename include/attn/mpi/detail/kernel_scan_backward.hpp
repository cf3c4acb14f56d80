// attn: the backward pass of kernel attention over a sequence spread over processes.
//
// First the sums of keys, as in the forward pass, are computed and stored: before each segment, or not causal of all
// keys.
//
// Bidirectional: blocks of queries read them and are summed up in turn, segment by segment in their order, for the keys
// of all processes. Causal: the sums of the queries come from the last process to the first, as those of keys go from
// the first to the last (kernel_scan.hpp), and waiting is avoided in the same way: the segments of the first heads are
// attended to twice, once for the sums of their queries alone; other heads wait for those of the process after this
// one.
#pragma once

#include <attn/kernel/detail/kernel_backward_call.hpp>
#include <attn/mpi/detail/kernel_scan.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <class T>
struct kernel_scan_backward {
  using driver = backward_driver<T>;
  using sums_type = kernel_sums<T>;
  using worker_scratch = typename driver::worker_scratch;
  using item_head_target = typename driver::item_head_target;

  const spread_sequence& sequence;
  const kernel_backward<T>& in;
  driver& one;
  execution& exec;
  idx_t feature_rows;
  const kernel_call<T>& call = in.call;
  const attention_shape& shape = call.shape;
  idx_t item_heads = shape.batch * call.heads, heads = shape.batch * shape.kv_heads;  // of sums, of keys
  idx_t segments = ceil_div(shape.keys, segment_of(shape.keys));
  idx_t query_segments = ceil_div(shape.queries, segment_of(shape.queries));
  idx_t unit = 0, units = 0, twice = 0;  // of key heads, as in kernel_scan
  /// Of every head of every item: the sums of keys that came before, with those that are here; and of queries, from the
  /// other end.
  sums_type *keys = nullptr, *queries = nullptr;
  struct stored_sums {
    sums_type sums;
    T decay;
  };
  stored_sums* before = nullptr;  // [item_heads][segments]
  stored_sums* after = nullptr;   // [item_heads of `twice` units][segments]; not causal [item_heads][query segments]

  std::size_t state_bytes() const {
    return static_cast<std::size_t>(sums_type::count(call.map->features, shape.dim_v, call.log_scaled())) * sizeof(T);
  }
  idx_t batch_of(idx_t item_head) const { return item_head / call.heads; }
  idx_t head_of(idx_t item_head) const { return item_head % call.heads; }
  /// The heads of a unit are [first_item_head(u), first_item_head(u + 1)).
  idx_t first_item_head(idx_t u) const { return std::min(u * unit, heads) * one.sums_per_key_head(); }
  bool sees_nothing(idx_t b) const { return sequence.keys(b) == 0 || sequence.queries(b) == 0; }
  worker_scratch scratch(int worker) const {
    return exec.scratch(worker, [&](arena& memory) { return one.layout(memory); });
  }

  void layout(arena& memory) {
    const auto sums = [&](arena& m) {
      return sums_type::layout(m, call.map->features, shape.dim_v, call.log_scaled());
    };
    const auto stored = [&](arena& m) { return stored_sums{sums(m), T(1)}; };
    call.map->layout(memory, item_heads);
    in.map.layout(memory, item_heads);
    keys = memory.allocate_list(item_heads, sums);
    queries = memory.allocate_list(item_heads, sums);
    before = memory.allocate_list(item_heads * segments, stored);
    one.shared.before = keys;  // the driver need not store any
    after = memory.allocate_list(call.causal ? first_item_head(twice) * segments : item_heads * query_segments, stored);
    one.feature_sums = memory.allocate_list(
        in.d_features ? item_heads : 0, [&](arena& m) { return sums_type::layout(m, feature_rows, shape.dim, false); });
  }

  /// body(item_head, segment, worker) for the segments of heads [first, end).
  template <class Body>
  void for_each_segment(idx_t first, idx_t end, const Body& body) {
    exec.for_each((end - first) * segments, [&](idx_t task, int worker) {
      const idx_t item_head = first + task / segments, n = task % segments;
      if (n < call.segments(batch_of(item_head))) body(item_head, n, worker);
    });
  }

  void sum_up_keys() {
    for_each_segment(0, item_heads, [&](idx_t item_head, idx_t n, int worker) {
      const idx_t b = batch_of(item_head), begin = n * call.segment(b);
      stored_sums& x = before[item_head * segments + n];
      x.decay = call.sum_up(b, head_of(item_head), begin, std::min(begin + call.segment(b), call.lengths.keys(b)),
                            scratch(worker).x.forward, x.sums);
    });
    auto messages = sequence.key_holders().chain(sequence.group());
    const auto s = scratch(0).x.forward;
    for (idx_t item_head = 0; item_head < item_heads; ++item_head) {
      keys[item_head].empty = !sequence.has_earlier_keys(batch_of(item_head));
      messages.expect(keys[item_head].values, state_bytes());
    }
    for (idx_t item_head = 0; item_head < item_heads && sequence.key_holders().holds(); ++item_head) {
      messages.receive(item_head);
      for (idx_t n = 0; n < call.segments(batch_of(item_head)); ++n) {
        stored_sums& x = before[item_head * segments + n];
        if (!call.causal) {
          call.add_segment(keys[item_head], x.decay, x.sums, s);
        } else {
          if (!keys[item_head].empty) combine(keys[item_head], x.decay, x.sums, x.sums, s.factors);
          std::swap(keys[item_head], x.sums);
        }
      }
      messages.send(keys[item_head].values, state_bytes());
    }
    messages.finish();
    if (!call.causal) tell_all(sequence.key_holders(), keys);
  }
  void tell_all(const holder_list& holders, sums_type* totals) {
    auto messages = holders.tree(sequence.group());
    for (idx_t item_head = 0; item_head < item_heads; ++item_head)
      messages.expect(totals[item_head].values, state_bytes());
    for (idx_t item_head = 0; item_head < item_heads; ++item_head) {
      messages.receive(item_head);
      messages.send(totals[item_head].values, state_bytes());
      totals[item_head].empty = sees_nothing(batch_of(item_head));
    }
    messages.finish();
  }

  void run_bidirectional() {
    exec.for_each(item_heads, [&](idx_t item_head, int worker) {
      const idx_t b = batch_of(item_head), all = call.lengths.queries(b);
      if (sees_nothing(b)) return;
      const auto w = scratch(worker);
      for (idx_t n = 0, step = segment_of(all); n * step < all; ++n) {
        const idx_t begin = n * step, end = std::min(begin + step, all);
        one.attend_rows(b, head_of(item_head), begin, end, keys[item_head], after[item_head * query_segments + n].sums,
                        w.x, in.d_features ? one.feature_sums + item_head : nullptr);
      }
    });
    if (in.reverse()) {
      auto messages = sequence.query_holders().chain(sequence.group());
      const auto s = scratch(0).x.forward;
      for (idx_t item_head = 0; item_head < item_heads; ++item_head) {
        const idx_t b = batch_of(item_head);
        queries[item_head].empty = sees_nothing(b) || !sequence.has_earlier_queries(b);
        messages.expect(queries[item_head].values, state_bytes());
      }
      for (idx_t item_head = 0; item_head < item_heads && sequence.query_holders().holds(); ++item_head) {
        messages.receive(item_head);
        const idx_t b = batch_of(item_head);
        for (idx_t n = 0; !sees_nothing(b) && n * segment_of(call.lengths.queries(b)) < call.lengths.queries(b); ++n)
          call.add_segment(queries[item_head], T(1), after[item_head * query_segments + n].sums, s);
        messages.send(queries[item_head].values, state_bytes());
      }
      messages.finish();
      tell_all(sequence.query_holders(), queries);
    }
    exec.for_each(heads, [&](idx_t n, int worker) {
      auto w = scratch(worker);
      run_head(n, w, [&](idx_t item_head, const item_head_target& to) {
        const idx_t b = batch_of(item_head);
        if (one.key_rows()) transpose_sums(queries[item_head], w.later_t);
        for (idx_t begin = 0; begin < call.lengths.keys(b) && in.reverse(); begin += kernel_chunk)
          one.attend_keys(b, head_of(item_head), begin, queries[item_head], w.later_t, w, to);
      });
    });
  }

  void run_causal() {
    const holder_list& holders = sequence.key_holders();
    auto messages = holders.chain(sequence.group(), true);
    for (idx_t item_head = 0; item_head < item_heads; ++item_head) {
      const idx_t b = batch_of(item_head);
      queries[item_head].empty = !in.reverse() || sees_nothing(b) || !sequence.has_later_keys(b);
      if (in.reverse()) messages.expect(queries[item_head].values, state_bytes());
    }
    if (!holders.holds()) return pad_all();
    for (idx_t u = 0; u < twice; ++u) sum_up_queries(u, messages);
    const idx_t first = std::min(holders.count() - 1 - holders.place, twice);
    for (idx_t u = 0; u < first; ++u) attend(u, messages);
    for (idx_t u = twice; u < units; ++u) attend(u, messages);
    for (idx_t u = first; u < twice; ++u) attend(u, messages);
    messages.finish();
  }

  /// Units whose queries are summed up before all else: `after`.
  void sum_up_queries(idx_t u, state_messages& messages) {
    for_each_segment(first_item_head(u), first_item_head(u + 1), [&](idx_t item_head, idx_t n, int worker) {
      if (sees_nothing(batch_of(item_head))) return;
      auto w = scratch(worker);
      stored_sums& x = after[item_head * segments + n];
      w.own_queries = x.sums;
      x.decay = one.attend_segment(batch_of(item_head), head_of(item_head), n, before[item_head * segments + n].sums, w,
                                   item_head_target{{}, {}, nullptr}, true);
      x.sums = w.own_queries;
      progress(messages, worker);
    });
    const auto s = scratch(0).x.forward;
    for (idx_t item_head = first_item_head(u); item_head < first_item_head(u + 1); ++item_head) {
      messages.receive(item_head);
      sums_type& later = queries[item_head];
      for (idx_t n = call.segments(batch_of(item_head)) - 1; n >= 0 && !sees_nothing(batch_of(item_head)); --n) {
        stored_sums& x = after[item_head * segments + n];
        if (x.sums.empty) {
          call.copy(later, x.sums);
          scale(later, x.decay);
        } else {
          if (!later.empty) combine(later, x.decay, x.sums, x.sums, s.factors);
          std::swap(later, x.sums);
        }
      }
      messages.send(later.values, state_bytes());
    }
  }

  /// The gradients of a unit.
  void attend(idx_t u, state_messages& messages) {
    const bool stored = u < twice;
    const idx_t first = first_item_head(u), end = first_item_head(u + 1);
    for (idx_t item_head = first; item_head < end && !stored && in.reverse(); ++item_head) messages.receive(item_head);
    exec.for_each(std::min((u + 1) * unit, heads) - u * unit, [&](idx_t n, int worker) {
      auto w = scratch(worker);
      const sums_type own_after = w.after;
      run_head(u * unit + n, w, [&](idx_t item_head, const item_head_target& to) {
        const idx_t b = batch_of(item_head), h = head_of(item_head);
        if (!stored) call.copy(queries[item_head], w.after);
        for (idx_t m = call.segments(b) - 1; m >= 0; --m) {
          if (stored) w.after = after[item_head * segments + m].sums;
          const T decay = one.attend_segment(b, h, m, before[item_head * segments + m].sums, w, to);
          if (!stored) one.add_queries(w.after, decay, w.own_queries, w.x.forward);
          progress(messages, worker);
        }
        if (stored)
          w.after = own_after;
        else if (in.reverse())
          call.copy(w.after, queries[item_head]);
      });
    });
    for (idx_t item_head = first; item_head < end && !stored && in.reverse(); ++item_head)
      messages.send(queries[item_head].values, state_bytes());
  }
  static void progress(state_messages& messages, int worker) {
    if (worker == 0) messages.progress();
  }

  /// One key head of a batch item, as in driver_backward.hpp: run_item_head(item_head, target) for each head of its sums.
  template <class RunItemHead>
  void run_head(idx_t number, worker_scratch& w, const RunItemHead& run_item_head) {
    const idx_t b = number / shape.kv_heads, kv_head = number % shape.kv_heads, count = call.lengths.keys(b);
    const auto to_k = in.dk.head(b, kv_head), to_v = in.dv.head(b, kv_head);
    if (in.of_gates()) std::fill_n(w.gates, shape.keys, T(0));
    for (idx_t n = 0; n < one.sums_per_key_head(); ++n) {
      const idx_t h = kv_head * one.sums_per_key_head() + n, item_head = b * call.heads + h;
      const item_head_target to{one.keep_dk() ? scratch_gradient(w.dk, shape.keys, shape.dim, n > 0) : to_k,
                           one.keep_dv() ? scratch_gradient(w.dv, shape.keys, shape.dim_v, n > 0) : to_v,
                           in.d_features ? one.feature_sums + item_head : nullptr};
      if (!sees_nothing(b)) run_item_head(item_head, to);
      if (in.of_gates() && in.d_gate.extent(1) == call.heads) {
        one.store_gates(b, h, w.gates);
        std::fill_n(w.gates, shape.keys, T(0));
      }
    }
    if (in.of_gates() && in.d_gate.extent(1) != call.heads) one.store_gates(b, kv_head, w.gates);
    if (one.keep_dk() && !sees_nothing(b)) to_k.store_rows(w.dk, shape.dim, 0, count);
    if (one.keep_dv() && !sees_nothing(b)) to_v.store_rows(w.dv, shape.dim_v, 0, count);
    pad(b, kv_head);
  }

  void pad(idx_t b, idx_t kv_head) const {
    const idx_t count = call.lengths.keys(b), rows = call.lengths.queries(b), group = shape.group();
    const idx_t seen = sees_nothing(b) ? 0 : count;
    if (in.dk) in.dk.head(b, kv_head).clear_rows(seen, shape.keys);
    if (in.dv) in.dv.head(b, kv_head).clear_rows(seen, shape.keys);
    const idx_t unseeing = sequence.keys(b) == 0                           ? rows
                           : call.causal && !sequence.has_earlier_keys(b) ? std::max<idx_t>(rows - count, 0)
                                                                           : 0;
    for (idx_t g = kv_head * group; g < (kv_head + 1) * group && in.dq; ++g) {
      in.dq.head(b, g).clear_rows(0, unseeing);
      in.dq.head(b, g).clear_rows(rows, shape.queries);
    }
  }
  void pad_all() const {
    for (idx_t n = 0; n < heads; ++n) pad(n / shape.kv_heads, n % shape.kv_heads);
  }

  /// The gradients of the features are summed over the processes, in the order of their ranks.
  void add_features() {
    const process_group& group = sequence.group();
    const idx_t each = sums_type::count(feature_rows, shape.dim, false);
    std::vector<T> sums(static_cast<std::size_t>(item_heads * each));
    const auto each_number = [&](const auto& body) {
      for (idx_t item_head = 0; item_head < item_heads; ++item_head)
        for (idx_t n = 0; n < each; ++n)
          body(sums[static_cast<std::size_t>(item_head * each + n)], one.feature_sums[item_head].values[n]);
    };
    std::vector<int> next;
    if (group.rank() + 1 < group.size()) next.push_back(group.rank() + 1);
    const std::size_t bytes = sums.size() * sizeof(T);
    pass_on(state_messages(group, group.rank() - 1, next), sums.data(), bytes,
            [&] { each_number([](T& sum, const T& own) { sum += own; }); });
    pass_on(tree_from(group.size() - 1, group), sums.data(), bytes, [] {});
    each_number([](const T& sum, T& own) { own = sum; });
  }

  template <class Prepare>
  void run(const Prepare& prepare) {
    auto work = call.work();
    work.operations *= 3, work.bytes *= 3;
    const auto limit = exec.limit_threads(work);
    const holder_list& holders = sequence.key_holders();
    unit = std::min<idx_t>(exec.active_threads(), heads);
    units = unit > 0 ? (heads + unit - 1) / unit : 0;
    twice = !in.reverse() || holders.first() ? 0 : std::clamp<idx_t>(holders.count() - 1, 0, units);
    exec.shared_scratch([&](arena& memory) {
      layout(memory);
      return 0;
    });
    prepare();
    in.map.prepare(exec);
    for (idx_t item_head = 0; item_head < item_heads && in.d_features; ++item_head) {
      std::fill_n(one.feature_sums[item_head].values, sums_type::count(feature_rows, shape.dim, false), T(0));
      one.feature_sums[item_head].empty = true;
    }
    sum_up_keys();
    call.causal ? run_causal() : run_bidirectional();
    if (in.d_features) add_features();
  }
};

/// A gradient without elements may be null, but what is computed depends on what is wanted, not on that.
template <class T, int Rank>
tensor_view<T, Rank> not_null(const tensor_view<T, Rank>& x) {
  static T none{};
  return x.data() || !memory_layout(x).given() ? x : tensor_view<T, Rank>(&none, x.extents(), x.strides());
}

/// What a process wants must be what all do.
template <class S>
void add_wanted(common_settings& settings, const kernel_backward_views<S>& a) {
  double wanted = a.accumulate;
  for (const bool one : {memory_layout(a.dq).given(), memory_layout(a.dk).given(), memory_layout(a.dv).given(),
                         memory_layout(a.d_features).given(), memory_layout(a.d_gate).given()})
    wanted = 2 * wanted + one;
  settings.add(wanted);
}

/// Runs a checked call.
template <class S, class Prepare, class T = compute_type<S>>
void run_spread_backward(const spread_sequence& sequence, const kernel_backward_views<S>& given, kernel_call<T>& call,
                         feature_map<T>& map, feature_map_backward<T>& back, execution& exec, const Prepare& prepare) {
  if (sequence.group().size() == 1) return run_kernel_backward(given, call, map, back, exec);
  kernel_backward_views<S> a = given;
  a.dq = not_null(a.dq), a.dk = not_null(a.dk), a.dv = not_null(a.dv), a.d_gate = not_null(a.d_gate);
  call.map = &map;
  const auto one = kernel_backward_of(a, call, back);
  if (!one.of_queries() && !one.reverse()) return;
  backward_driver<T> driver{one};
  kernel_scan_backward<T>{.sequence = sequence, .in = one, .one = driver, .exec = exec,
                          .feature_rows = a.x.features.extent(1)}
      .run(prepare);
  store_feature_gradients(a, call, driver.feature_sums);
}

}}}  // namespace attn::ATTN_ISA::detail
