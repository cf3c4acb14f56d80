// attn: the driver of the backward pass of kernel attention by sums of features.
//
// Bidirectional: 1. keys are summed up as in the forward pass: S, z 2. blocks of queries read them and are themselves
// summed up: R, y 3. chunks of keys read those. Causal: 1. keys are summed up, keeping the sums before every segment 2.
// segments, last first: the sums before each of their chunks are computed again, then chunks are processed from the
// last to the first, with the sums of the keys before them and of the queries after them. Segments have separate sums,
// as in the forward pass, and for the same reasons. One task is one key head; heads that are no multiple of the threads
// are shared by segments (shared_heads.hpp), causal with the sums of the queries of segments that come later computed
// first.
#pragma once

#include <attn/kernel/detail/gate_gradients.hpp>
#include <attn/kernel/detail/key_rows_backward.hpp>
#include <attn/kernel/detail/shared_heads.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <class T>
struct backward_driver {
  using sums_type = kernel_sums<T>;

  const kernel_backward<T>& in;
  const kernel_call<T>& call = in.call;
  const attention_shape& shape = call.shape;
  sums_type* feature_sums = nullptr;  // [batch * heads]: of each head, the gradient of its features

  bool store_before = true;  // workers keep the sums of the keys before each segment
  shared_sums<T> shared_keys{}, shared_queries{};  // causal of all segments, those of queries from the last on
  sums_type* queries_t = nullptr;                  // [shared heads]: of all queries, R^T

  struct worker_scratch {
    kernel_backward_scratch<T> x;
    sums_type own, own_queries, after, later;  // a segment's own; those after it; both
    sums_type *before, *seen;                  // [segments], [chunks]: of the keys before each
    T *dk, *dv, *gates;                        // of all keys of a head, where several heads of sums add to it
    key_rows_scratch<T> rows;
    sums_type later_t;  // R^T
  };

  idx_t sums_per_key_head() const { return shape.kv_heads > 0 ? call.heads / shape.kv_heads : 1; }
  bool keep_dk() const { return in.dk && (sums_per_key_head() > 1 || in.map->finishes_keys); }
  bool keep_dv() const { return in.dv && sums_per_key_head() > 1; }
  bool key_rows() const { return in.map->by_rows && !call.causal && (in.dk || in.dv); }

  worker_scratch layout(arena& memory) const {
    const idx_t m = call.map->features;
    const bool log_scaled = call.log_scaled();
    const auto sums = [&] { return call.allocate_sums(memory); };
    const auto list = [&](idx_t count) { return memory.allocate_list(count, [&](arena&) { return sums(); }); };
    worker_scratch w;
    const bool paired = call.v.access->paired;
    const auto forward = kernel_scratch<T>::layout(
        memory, m, shape.dim_v, std::max(call.map->scratch_size, in.map->scratch_size), log_scaled, paired);
    w.x = kernel_backward_scratch<T>::layout(memory, forward, shape, m, log_scaled, call.gated(), paired);
    w.own = sums(), w.own_queries = sums(), w.after = sums(), w.later = sums();
    w.before = list(call.causal && store_before ? most_segments(shape.keys) : 0);
    w.seen = list(call.causal ? ceil_div(std::min(segment_of(shape.keys), shape.keys), kernel_chunk) : 0);
    w.dk = memory.allocate<T>(keep_dk() ? shape.keys * shape.dim : 0);
    w.dv = memory.allocate<T>(keep_dv() ? shape.keys * shape.dim_v : 0);
    w.gates = memory.allocate<T>(in.of_gates() ? shape.keys : 0);
    if (key_rows()) {
      w.rows = key_rows_scratch<T>::layout(memory, m, shape.dim_v, w.x.operands);
      w.later_t = sums_type::layout(memory, shape.dim_v, m, sum_parts::weights);
    }
    return w;
  }

  void layout_shared(arena& memory, idx_t heads, idx_t threads) {
    const auto wave = [&](idx_t tokens) {
      const idx_t all = most_segments(tokens);
      return call.causal ? all : shared_sums<T>::wave_of(heads, all, threads);
    };
    shared_keys = shared_sums<T>::layout(memory, call, heads, wave(shape.keys));
    shared_queries = shared_sums<T>::layout(memory, call, heads, wave(call.causal ? shape.keys : shape.queries));
    queries_t = memory.allocate_list(key_rows() ? heads : 0, [&](arena& one) {
      return sums_type::layout(one, shape.dim_v, call.map->features, sum_parts::weights);
    });
  }

  /// Where one head of sums stores the gradients of its keys.
  struct item_head_target {
    stored_gradient_head<T> k, v;
    sums_type* features;
  };

  /// into = factor a + b, of which a may be empty.
  static void join(const sums_type& a, T factor, const sums_type& b, sums_type& into, T* scratch) {
    if (a.empty)
      kernel_call<T>::copy(b, into);
    else
      combine(a, factor, b, into, scratch);
  }

  /// Bidirectional: the blocks of queries of one segment, which `own` takes.
  void attend_rows(idx_t b, idx_t h, idx_t begin, idx_t end, const sums_type& sums, sums_type& own,
                   const kernel_backward_scratch<T>& x, sums_type* features) const {
    own.clear();
    for (idx_t i = begin; i < end; i += kernel_chunk)
      for (idx_t g = 0; g < call.group(); ++g)
        in.attend_block({b, h, h * call.group() + g, i, 0, std::min<idx_t>(kernel_chunk, end - i), 0}, &sums,
                        in.reverse() ? &own : nullptr, T(1), x, features);
  }
  void attend_keys(idx_t b, idx_t h, idx_t begin, const sums_type& after, const sums_type& later_t,
                   const worker_scratch& w, const item_head_target& to) const {
    const idx_t count = std::min<idx_t>(kernel_chunk, call.lengths.keys(b) - begin);
    row_prefetcher<> prefetch = in.prefetch_keys(b, h, begin, to.k, to.v);
    if (key_rows()) return attend_key_rows(in, b, h, begin, count, after, later_t, w.rows, to.k, to.v, prefetch);
    in.load_chunk(b, h, begin, count, false, w.x);
    in.from_later(&after, count, prefetch, w.x);
    in.store_chunk(b, h, begin, count, to.k, to.v, to.features, w.x);
  }

  /// Bidirectional, one head by one worker.
  void run_both(idx_t b, idx_t h, worker_scratch& w, const item_head_target& to) const {
    const auto& s = w.x.forward;
    const idx_t keys_here = call.lengths.keys(b), rows = call.lengths.queries(b), step = segment_of(rows);
    sums_type& sums = w.later;
    sums.empty = w.after.empty = true;
    for (idx_t n = 0; n < call.segments(b); ++n)
      call.add_segment(sums, call.sum_up_segment(b, h, n, s, w.own), w.own, s);
    for (idx_t begin = 0; begin < rows; begin += step) {
      attend_rows(b, h, begin, std::min(begin + step, rows), sums, w.own, w.x, to.features);
      if (!w.own.empty) call.add_segment(w.after, T(1), w.own, s);
    }
    if (key_rows()) transpose_sums(w.after, w.later_t);
    for (idx_t begin = 0; begin < keys_here && in.reverse(); begin += kernel_chunk)
      attend_keys(b, h, begin, w.after, w.later_t, w, to);
  }

  worker_scratch scratch(execution& exec, int worker) const {
    return exec.scratch(worker, [&](arena& memory) { return layout(memory); });
  }

  /// Causal, one head by one worker.
  void run_causal(idx_t b, idx_t h, worker_scratch& w, const item_head_target& to) const {
    const auto& s = w.x.forward;
    w.before[0].empty = w.after.empty = true;
    for (idx_t n = 0; n + 1 < call.segments(b); ++n)
      join(w.before[n], call.sum_up_segment(b, h, n, s, w.own), w.own, w.before[n + 1], s.factors);
    attend_segments(b, h, 0, call.segments(b), w.before, w, to);
  }
  /// Segments [begin, end), the last one first; `before` has the sums of the keys before each segment, w.after becomes
  /// those of the queries from `begin` on.
  void attend_segments(idx_t b, idx_t h, idx_t begin, idx_t end, const sums_type* before, worker_scratch& w,
                       const item_head_target& to) const {
    for (idx_t n = end - 1; n >= begin; --n)
      add_queries(w.after, attend_segment(b, h, n, before[n], w, to), w.own_queries, w.x.forward);
  }

  /// Heads from `whole` on by all threads, after run_whole(n, worker) for those before.
  template <class RunWhole>
  void share_both(execution& exec, idx_t whole, const RunWhole& run_whole) const {
    const idx_t heads = shared_keys.heads, chunks = ceil_div(shape.keys, kernel_chunk);
    const auto b = [&](idx_t n) { return batch_of(whole + n); };
    const auto h = [&](idx_t n) { return head_of(whole + n); };
    const auto forward = [&](int worker) { return scratch(exec, worker).x.forward; };
    const auto rows = [&](idx_t n) { return sees_nothing(whole + n) ? 0 : call.lengths.queries(b(n)); };
    shared_keys.sum_up(
        exec, whole, heads > 0 ? most_segments(shape.keys) : 0, run_whole,
        [&](idx_t n) { return sees_nothing(whole + n) ? 0 : call.segments(b(n)); },
        [&](idx_t n, idx_t segment, sums_type& sums, int worker) {
          return call.sum_up_segment(b(n), h(n), segment, forward(worker), sums);
        },
        forward);
    shared_queries.sum_up(
        exec, 0, heads > 0 ? most_segments(shape.queries) : 0, run_whole,
        [&](idx_t n) { return ceil_div(rows(n), segment_of(rows(n))); },
        [&](idx_t n, idx_t segment, sums_type& sums, int worker) {
          const idx_t step = segment_of(rows(n)), begin = segment * step, end = std::min(begin + step, rows(n));
          attend_rows(b(n), h(n), begin, end, *shared_keys.of(n), sums, scratch(exec, worker).x, nullptr);
          return T(1);
        },
        forward);
    if (!in.reverse()) return;
    const auto later = [&](idx_t n) -> const sums_type& { return *shared_queries.of(n); };
    if (key_rows()) exec.for_each(heads, [&](idx_t n, int) { transpose_sums(later(n), queries_t[n]); });
    exec.for_each(heads * chunks, [&](idx_t task, int worker) {
      const idx_t n = task / chunks, begin = task % chunks * kernel_chunk;
      if (!sees_nothing(whole + n) && begin < call.lengths.keys(b(n)))
        attend_keys(b(n), h(n), begin, later(n), key_rows() ? queries_t[n] : sums_type{}, scratch(exec, worker),
                    target(whole + n));
    });
  }
  template <class RunWhole>
  void share_causal(execution& exec, idx_t whole, const RunWhole& run_whole) const {
    const shared_sums<T>&before = shared_keys, &after = shared_queries;
    const idx_t all = before.most, lead = leading_segments(before.heads, all, exec.active_threads(), summing());
    const auto b = [&](idx_t n) { return batch_of(whole + n); };
    const auto h = [&](idx_t n) { return head_of(whole + n); };
    const auto forward = [&](int worker) { return scratch(exec, worker).x.forward; };
    const auto segments = [&](idx_t n) { return sees_nothing(whole + n) ? 0 : call.segments(b(n)); };
    const auto attend = [&](idx_t n, idx_t segment, worker_scratch& w, bool sums_only) {
      return attend_segment(b(n), h(n), segment, before.of(n)[segment], w, target(whole + n), sums_only);
    };
    before.run_parts(
        exec, whole, all - 1, run_whole,
        [&](idx_t n, idx_t at, int worker) {
          if (at + 1 < segments(n))
            before.decays_of(n)[at] = call.sum_up_segment(b(n), h(n), at, forward(worker), before.of(n)[at + 1]);
        },
        [&](idx_t n, int worker) { before.add_up(n, 0, segments(n) - 1, forward(worker)); });
    if (in.reverse())
      after.run_parts(
          exec, 0, 1 + all - lead, run_whole,
          [&](idx_t n, idx_t part, int worker) {
            worker_scratch w = scratch(exec, worker);
            const idx_t at = lead + part - 1, segment = segments(n) - 1 - at;
            if (part > 0 && segment > 0) {
              w.own_queries = after.of(n)[at + 1];
              after.decays_of(n)[at] = attend(n, segment, w, true);
              after.of(n)[at + 1] = w.own_queries;
            } else if (part == 0 && lead > 0) {
              w.after.empty = true;
              attend_segments(b(n), h(n), std::max<idx_t>(segments(n) - lead, 0), segments(n), before.of(n), w,
                              target(whole + n));
              call.copy(w.after, after.of(n)[lead]);
            }
          },
          [&](idx_t n, int worker) { after.add_up(n, lead, segments(n) - 1, forward(worker)); });
    exec.for_each(before.heads * (all - lead), [&](idx_t task, int worker) {
      const idx_t n = task % before.heads, at = lead + task / before.heads, segment = segments(n) - 1 - at;
      if (segment < 0) return;
      worker_scratch w = scratch(exec, worker);
      w.after = after.of(n)[at], w.after.empty = w.after.empty || !in.reverse();
      attend(n, segment, w, false);
    });
  }

  /// Adds the sums of the queries of the segment before, which are lost.
  void add_queries(sums_type& sums, T decay, sums_type& own, const kernel_scratch<T>& s) const {
    if (own.empty)
      scale(sums, decay);
    else
      call.add_segment(sums, decay, own, s);
  }

  /// Segment n, with the keys before it in `before`; its queries are summed up in w.own_queries. `sums_only`: nothing
  /// else is computed.
  T attend_segment(idx_t b, idx_t h, idx_t n, const sums_type& before, worker_scratch& w, const item_head_target& to,
                   bool sums_only = false) const {
    const idx_t begin = n * call.segment(b), end = std::min<idx_t>(begin + call.segment(b), call.lengths.keys(b));
    sum_before(b, h, begin, end, before, w);
    T decay = T(1);
    w.own_queries.clear();
    for (idx_t c = ceil_div(end - begin, kernel_chunk) - 1; c >= 0; --c)
      decay *= attend_chunk(b, h, begin + c * kernel_chunk, std::min(begin + (c + 1) * kernel_chunk, end), w.seen[c],
                            decay, w, to, sums_only);
    return decay;
  }

  /// The sums of the keys before every chunk of a segment.
  void sum_before(idx_t b, idx_t h, idx_t begin, idx_t end, const sums_type& before, worker_scratch& w) const {
    const auto& s = w.x.forward;
    const idx_t offset = call.lengths.keys(b) - call.lengths.queries(b);  // position of query 0
    T decay = T(1);
    w.own.clear();
    for (idx_t c = begin, n = 0; c < end; c += kernel_chunk, ++n) {
      if (c == begin)
        kernel_call<T>::copy(before, w.seen[n]);
      else if (c + kernel_chunk > offset || in.of_gates())  // it has queries
        join(before, decay, w.own, w.seen[n], s.factors);
      if (c + kernel_chunk >= end) continue;
      call.load_keys(b, h, c, kernel_chunk, s, s.k_phi);
      row_prefetcher<> prefetch = call.prefetch_keys(b, h, c + kernel_chunk);
      decay *= call.prepare_gates(b, h, c, kernel_chunk, s);
      if (call.log_scaled()) call.map->scaling->keys_for_sums(s.k_phi, w.own.log_scale, s);
      call.add_chunk(s, w.own, kernel_chunk, prefetch);
    }
  }

  /// Keys [begin, end) and the queries at their positions; `decay` is the product of the gates after them in the
  /// segment. Returns that of their own.
  T attend_chunk(idx_t b, idx_t h, idx_t begin, idx_t end, const sums_type& seen, T decay, worker_scratch& w,
                 const item_head_target& to, bool sums_only) const {
    const auto& x = w.x;
    const auto& s = x.forward;
    const idx_t offset = call.lengths.keys(b) - call.lengths.queries(b), count = end - begin;
    const idx_t first = std::max(offset - begin, idx_t(0));  // lane of the first query in the chunk
    const bool queries = first < count;
    in.load_chunk(b, h, begin, count, queries, x);
    const T own_decay = call.gated() ? s.decay[count - 1] : T(1);
    const sums_type* before = queries && !seen.empty ? &seen : nullptr;
    const auto attend_queries = [&] {
      for (idx_t g = 0; g < call.group() && queries; ++g)
        in.attend_block({b, h, h * call.group() + g, begin - offset, first, count, count}, before,
                        in.reverse() ? &w.own_queries : nullptr, g == 0 ? own_decay : T(1), x, to.features, sums_only);
      if (!queries) scale(w.own_queries, own_decay);
    };
    if (sums_only) return attend_queries(), own_decay;
    const sums_type* later = w.own_queries.empty ? &w.after : w.after.empty ? &w.own_queries : &w.later;
    if (later == &w.later) combine(w.after, decay, w.own_queries, w.later, s.factors);
    if (later == &w.after && decay != T(1) && !w.after.empty) {  // no queries in the chunks between
      kernel_call<T>::copy(w.after, w.later);
      scale(w.later, decay);
      later = &w.later;
    }
    if (later->empty) later = nullptr;
    row_prefetcher<> prefetch = in.prefetch_keys(b, h, begin, to.k, to.v);
    if (in.reverse()) in.from_later(later, count, prefetch, x);
    if (in.of_gates()) {
      std::fill_n(x.gate_scores, kernel_chunk * kernel_chunk, T(0));
      std::fill_n(x.gate_queries, kernel_chunk, T(0));
    }
    const T of_sums = in.of_gates() && later && !seen.empty ? dot_sums(seen, *later) : T(0);
    attend_queries();
    if (in.of_gates()) {
      transpose_scores(x.gate_scores, count, x.products_t);
      gate_chunk<T>{count, call.complement, s.gates, s.decay, s.score_factor, x.products_t, x.gate_queries, x.gate_keys,
                    of_sums}
          .add_to(w.gates + begin);
    }
    if (in.of_keys() || in.dv) in.store_chunk(b, h, begin, count, to.k, to.v, to.features, x);
    return own_decay;
  }

  /// One key head of a batch item, unless `empty`: run_item_head(h, target) for each head of its sums.
  template <class RunItemHead>
  void run_head(idx_t b, idx_t kv_head, bool empty, worker_scratch& w, const RunItemHead& run_item_head) const {
    const idx_t keys = call.lengths.keys(b), each = sums_per_key_head();
    const auto to_k = in.dk.head(b, kv_head), to_v = in.dv.head(b, kv_head);
    if (in.of_gates()) std::fill_n(w.gates, shape.keys, T(0));
    for (idx_t n = 0; n < each; ++n) {
      const idx_t h = kv_head * each + n, item_head = b * call.heads + h;
      const item_head_target to{keep_dk() ? scratch_gradient(w.dk, shape.keys, shape.dim, n > 0) : to_k,
                                keep_dv() ? scratch_gradient(w.dv, shape.keys, shape.dim_v, n > 0) : to_v,
                                in.d_features ? feature_sums + item_head : nullptr};
      if (!empty) run_item_head(h, to);
      if (!empty && in.map->finishes_keys && in.of_keys())
        in.map->finish_head(item_head, in.dk ? w.dk : nullptr, to.features, w.x.forward.map);
      if (in.of_gates() && in.d_gate.extent(1) == call.heads) {
        store_gates(b, h, w.gates);
        std::fill_n(w.gates, shape.keys, T(0));
      }
    }
    if (in.of_gates() && in.d_gate.extent(1) != call.heads) store_gates(b, kv_head, w.gates);
    if (keep_dk() && !empty) {
      if (in.map->finishes_keys) in.map->finish_keys(w.dk, b);
      to_k.store_rows(w.dk, shape.dim, 0, keys);
    }
    if (keep_dv() && !empty) to_v.store_rows(w.dv, shape.dim_v, 0, keys);
  }

  /// Zeros for padding, for the first queries, which see no key, and for keys that no query sees, all if `empty`.
  void pad(idx_t b, idx_t kv_head, bool empty, idx_t unseeing) const {
    const idx_t group = shape.group(), seen = empty ? 0 : call.lengths.keys(b);
    if (in.dk) in.dk.head(b, kv_head).clear_rows(seen, shape.keys);
    if (in.dv) in.dv.head(b, kv_head).clear_rows(seen, shape.keys);
    for (idx_t g = kv_head * group; g < (kv_head + 1) * group && in.dq; ++g) {
      in.dq.head(b, g).clear_rows(0, unseeing);
      in.dq.head(b, g).clear_rows(call.lengths.queries(b), shape.queries);
    }
  }
  void store_gates(idx_t b, idx_t h, const T* sums) const {
    for (idx_t t = 0; t < shape.keys; ++t) store_gradient(in.d_gate(b, h, t), sums[t], in.accumulate);
  }

  void layout_features(arena& memory, idx_t rows) {
    feature_sums = memory.allocate_list(in.d_features ? shape.batch * call.heads : 0, [&](arena& one) {
      return sums_type::layout(one, rows, shape.dim, sum_parts::weights);
    });
  }
  void clear_features() {
    for (idx_t n = 0; in.d_features && n < shape.batch * call.heads; ++n) feature_sums[n].clear();
  }

  // A key head is a task; where it is shared, it has one head of sums.
  idx_t batch_of(idx_t n) const { return n / shape.kv_heads; }
  idx_t head_of(idx_t n) const { return n % shape.kv_heads; }
  bool sees_nothing(idx_t n) const {
    return call.lengths.keys(batch_of(n)) == 0 || call.lengths.queries(batch_of(n)) == 0;
  }
  item_head_target target(idx_t n) const {
    return {in.dk.head(batch_of(n), head_of(n)), in.dv.head(batch_of(n), head_of(n)), nullptr};
  }
  /// The time of summing up the queries of a causal segment, of that of its gradients.
  double summing() const { return in.reverse() ? 0.5 : 0; }

  head_split split_of(idx_t heads, idx_t threads) const {
    // Heads can only be shared where S and R are the only sums over all of their tokens.
    if (in.d_features || in.map->finishes_keys || in.of_gates() || sums_per_key_head() > 1) return {heads, 0};
    return call.causal ? head_split::causal(heads, most_segments(shape.keys), threads, summing())
                       : head_split::of(heads, threads);
  }

  /// Afterwards feature_sums has the sums of the gradients of the features of every head of sums.
  void run(execution& exec, idx_t feature_rows) {
    auto work = call.work();
    work.operations *= 3, work.bytes *= 3;
    const auto limit = exec.limit_threads(work);
    const idx_t item_heads = shape.batch * call.heads, heads = shape.batch * shape.kv_heads;
    const idx_t threads = exec.active_threads();
    const head_split split = split_of(heads, threads);
    store_before = split.whole > 0;
    exec.shared_scratch([&](arena& memory) {
      call.map->layout(memory, item_heads);
      in.map->layout(memory, item_heads);
      layout_shared(memory, split.shared, threads);
      layout_features(memory, feature_rows);
      return 0;
    });
    call.map->prepare(exec);
    in.map->prepare(exec);
    clear_features();
    shared_keys.clear(), shared_queries.clear();
    const auto pad_head = [&](idx_t n) { pad(batch_of(n), head_of(n), sees_nothing(n), call.unseeing(batch_of(n))); };
    const auto run_whole = [&](idx_t n, int worker) {
      auto w = scratch(exec, worker);
      run_head(batch_of(n), head_of(n), sees_nothing(n), w, [&](idx_t h, const item_head_target& to) {
        call.causal ? run_causal(batch_of(n), h, w, to) : run_both(batch_of(n), h, w, to);
      });
      pad_head(n);
    };
    call.causal ? share_causal(exec, split.whole, run_whole) : share_both(exec, split.whole, run_whole);
    for (idx_t n = split.whole; n < heads; ++n) pad_head(n);
  }
};

}}}  // namespace attn::ATTN_ISA::detail
