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

#include <attn/kernel/detail/sums_backward_run.hpp>
#include <attn/mpi/detail/kernel_scan.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <class T>
struct kernel_scan_backward : spread_states<T> {
  using base = spread_states<T>;
  using base::batch_of, base::call, base::exec, base::head_in_item, base::holders, base::item_heads, base::kernel,
      base::keys, base::segments, base::segments_of, base::sequence, base::stored_of, base::summed_first, base::unit,
      base::units;
  using driver = sums_backward_driver<T>;
  using sums_type = kernel_sums<T>;
  using stored_sums = typename base::stored_sums;
  using worker_scratch = typename driver::worker_scratch;
  using item_head_target = typename driver::item_head_target;

  const sums_kernel_backward<T>& in;
  driver& one;
  const attention_shape& shape = call.shape;
  idx_t heads = shape.batch * shape.kv_heads;  // of keys, which make up units
  idx_t query_segments = most_segments(shape.queries);
  sums_type* queries = nullptr;  // as keys, causal from the other end
  stored_sums* after = nullptr;  // [heads of `summed_first` units][segments]; not causal [item_heads][query segments]

  /// The heads of a unit are [first_item_head(u), first_item_head(u + 1)).
  idx_t first_item_head(idx_t u) const { return (std::min)(u * unit, heads) * one.sums_per_key_head(); }
  bool has_no_scores(idx_t b) const { return sequence.keys(b) == 0 || sequence.queries(b) == 0; }
  worker_scratch scratch(int worker) const { return one.scratch(exec, worker); }

  void layout(arena& memory) {
    call.map->layout(memory, item_heads);
    in.map->layout(memory, item_heads);
    this->layout_keys(memory, item_heads);
    queries = this->allocate_states(memory);
    one.store_before = false;
    after = this->allocate_stored(memory,
                                  call.causal ? first_item_head(summed_first) * segments : item_heads * query_segments);
    one.layout_features(memory, call.projection.extents[2]);
  }

  void sum_up() {
    auto messages = holders.chain(sequence.group());
    this->expect_keys(messages);
    if (holders.holds()) this->sum_up_keys(0, item_heads, messages);
    messages.finish();
    if (!call.causal) broadcast_sums(holders, keys);
  }
  void broadcast_sums(const holder_list& among, sums_type* totals) {
    auto messages = among.tree(sequence.group());
    base::broadcast_sums(messages, totals, [&](idx_t b) { return has_no_scores(b); });
    messages.finish();
  }

  void run_bidirectional() {
    exec.for_each(item_heads, [&](idx_t item_head, int worker) {
      const idx_t b = batch_of(item_head), all = call.lengths.queries(b);
      if (has_no_scores(b)) return;
      const auto w = scratch(worker);
      for (idx_t n = 0, step = segment_tokens(all); n * step < all; ++n) {
        const idx_t begin = n * step, end = (std::min)(begin + step, all);
        one.attend_rows(b, head_in_item(item_head), begin, end, keys[item_head],
                        after[item_head * query_segments + n].sums, w.x,
                        in.d_features ? one.feature_sums + item_head : nullptr);
      }
    });
    if (in.reverse()) {
      auto messages = sequence.query_holders().chain(sequence.group());
      const auto s = scratch(0).x.forward;
      for (idx_t item_head = 0; item_head < item_heads; ++item_head) {
        const idx_t b = batch_of(item_head);
        queries[item_head].empty = has_no_scores(b) || !sequence.has_earlier_queries(b);
      }
      this->expect(messages, queries);
      const idx_t here = sequence.query_holders().holds() ? item_heads : 0;
      this->scan(messages, 0, here, queries, [&](idx_t item_head) {
        const idx_t b = batch_of(item_head), all = call.lengths.queries(b);
        for (idx_t n = 0; !has_no_scores(b) && n * segment_tokens(all) < all; ++n)
          kernel.add_segment(queries[item_head], T(1), after[item_head * query_segments + n].sums, s);
      });
      messages.finish();
      broadcast_sums(sequence.query_holders(), queries);
    }
    exec.for_each(heads, [&](idx_t n, int worker) {
      auto w = scratch(worker);
      run_head(n, w, [&](idx_t item_head, const item_head_target& to) {
        const idx_t b = batch_of(item_head);
        if (one.key_rows()) transpose_sums(queries[item_head], w.later_t);
        for (idx_t begin = 0; begin < call.lengths.keys(b) && in.reverse(); begin += kernel_chunk)
          one.attend_keys(b, head_in_item(item_head), begin, queries[item_head], w.later_t, w, to);
      });
    });
  }

  void run_causal() {
    auto messages = holders.chain(sequence.group(), true);
    for (idx_t item_head = 0; item_head < item_heads; ++item_head) {
      const idx_t b = batch_of(item_head);
      queries[item_head].empty = !in.reverse() || has_no_scores(b) || !sequence.has_later_keys(b);
    }
    if (in.reverse()) this->expect(messages, queries);
    for (idx_t n = 0; n < heads && !holders.holds(); ++n) pad(n);
    if (!holders.holds()) return;
    for (idx_t u = 0; u < summed_first; ++u) sum_up_queries(u, messages);
    const idx_t first = (std::min)(holders.count() - 1 - holders.place, summed_first);
    for (idx_t u = 0; u < first; ++u) attend(u, messages);
    for (idx_t u = summed_first; u < units; ++u) attend(u, messages);
    for (idx_t u = first; u < summed_first; ++u) attend(u, messages);
    messages.finish();
  }

  /// Units whose queries are summed up before all else: `after`.
  void sum_up_queries(idx_t u, state_messages& messages) {
    const idx_t first = first_item_head(u), end = first_item_head(u + 1);
    this->for_each_segment(first, end, messages, [&](idx_t item_head, idx_t n, idx_t, idx_t, int worker) {
      if (has_no_scores(batch_of(item_head))) return;
      auto w = scratch(worker);
      stored_sums& x = after[item_head * segments + n];
      w.own_queries = x.sums;
      x.decay = one.attend_segment(batch_of(item_head), head_in_item(item_head), n, stored_of(item_head, n).sums, w,
                                   item_head_target{{}, {}, nullptr}, true);
      x.sums = w.own_queries;
    });
    const auto s = scratch(0).x.forward;
    this->scan(messages, first, end, queries, [&](idx_t item_head) {
      sums_type& later = queries[item_head];
      for (idx_t n = segments_of(item_head) - 1; n >= 0 && !has_no_scores(batch_of(item_head)); --n) {
        stored_sums& x = after[item_head * segments + n];
        if (x.sums.empty) {
          copy_sums(later, x.sums);
          scale(later, x.decay);
        } else {
          if (!later.empty) combine(later, x.decay, x.sums, x.sums, s.factors);
          std::swap(later, x.sums);
        }
      }
    });
  }
  /// The gradients of a unit.
  void attend(idx_t u, state_messages& messages) {
    const bool known = u < summed_first;
    const idx_t first = first_item_head(u), end = first_item_head(u + 1);
    for (idx_t item_head = first; item_head < end && !known && in.reverse(); ++item_head) messages.receive(item_head);
    exec.for_each((std::min)((u + 1) * unit, heads) - u * unit, [&](idx_t n, int worker) {
      auto w = scratch(worker);
      const sums_type own_after = w.after;
      run_head(u * unit + n, w, [&](idx_t item_head, const item_head_target& to) {
        const idx_t b = batch_of(item_head), h = head_in_item(item_head);
        if (!known) copy_sums(queries[item_head], w.after);
        for (idx_t m = segments_of(item_head) - 1; m >= 0; --m) {
          if (known) w.after = after[item_head * segments + m].sums;
          const T decay = one.attend_segment(b, h, m, stored_of(item_head, m).sums, w, to);
          if (!known) one.add_queries(w.after, decay, w.own_queries, w.x.forward);
          this->progress(messages, worker);
        }
        if (known)
          w.after = own_after;
        else if (in.reverse())
          copy_sums(w.after, queries[item_head]);
      });
    });
    for (idx_t item_head = first; item_head < end && !known && in.reverse(); ++item_head)
      messages.send(queries[item_head].values, this->state_bytes());
  }
  /// One key head of a batch item: run_item_head(item_head, target) for each head of its sums.
  template <class RunItemHead>
  void run_head(idx_t number, worker_scratch& w, const RunItemHead& run_item_head) const {
    const idx_t b = number / shape.kv_heads;
    one.run_head(b, number % shape.kv_heads, has_no_scores(b), w, [&](idx_t h, const item_head_target& to) {
      run_item_head(b * call.heads + h, to);
    });
    pad(number);
  }
  void pad(idx_t number) const {
    const idx_t b = number / shape.kv_heads;
    one.pad(b, number % shape.kv_heads, has_no_scores(b), this->queries_without_keys(b));
  }

  /// The gradients of the features are summed over the processes, in the order of their ranks.
  void add_features() {
    const process_communicator& group = sequence.group();
    const idx_t each = sums_type::count(call.projection.extents[2], shape.dim, sum_parts::weights);
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
    unit = std::min<idx_t>(exec.active_threads(), heads);
    units = unit > 0 ? (heads + unit - 1) / unit : 0;
    summed_first = !in.reverse() || holders.first() ? 0 : std::clamp<idx_t>(holders.count() - 1, 0, units);
    exec.shared_scratch([&](arena& memory) {
      layout(memory);
      return 0;
    });
    prepare();
    in.map->prepare(exec);
    one.clear_features();
    sum_up();
    call.causal ? run_causal() : run_bidirectional();
    if (in.d_features) add_features();
  }
};

/// What a process wants must be what all do.
template <class S>
void add_wanted(common_settings& settings, const kernel_gradients<S>& g) {
  double wanted = g.accumulate;
  for (const memory_layout& one : {memory_layout(g.q), memory_layout(g.k), memory_layout(g.v),
                                   memory_layout(g.features), memory_layout(g.gate)})
    wanted = 2 * wanted + one.given();
  settings.add(wanted);
}

/// A backward call; back(map) gives the backward pass of its map.
template <class S, class Operator, class T = compute_type<S>>
void run_spread_backward(const char* name, MPI_Comm communicator, const kernel_views<S>& x,
                         const std::type_identity_t<kernel_gradients<S>>& g, Operator one, execution& exec) {
  if constexpr (Operator::usable()) {
    distributed_sequence sequence(name, communicator, x.q.extent(2), x.k.extent(2));
    kernel_backward_call<T> wanted;
    wanted.forward = check_spread(
        sequence, x, one, [&](call_views& check, const auto& given, common_settings& settings) {
          add_wanted(settings, g);
          wanted = check_kernel_backward(check, x, g, given);
          return wanted.forward;
        });
    kernel_call<T>& call = wanted.forward;
    auto map = one.map(call);
    auto back = one.back(map);
    call.map = &map, wanted.map = &back;
    if (!wanted.any()) return;
    if (sequence.group().size() == 1) return run_sums_backward(wanted, exec);
    const sums_kernel_backward<T> in{wanted};
    sums_backward_driver<T> driver{{in}};
    driver.earlier_keys = true;
    kernel_scan_backward<T>{{sequence, call, exec}, in, driver}.run([&] { prepare_spread(map, sequence, exec); });
    store_feature_gradients(wanted, driver.feature_sums, exec);
  }
}

}}}  // namespace attn::ATTN_ISA::detail
