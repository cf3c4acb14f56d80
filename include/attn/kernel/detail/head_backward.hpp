// attn: the backward pass of kernel attention by sums of features: one head of sums by one worker.
//
// Bidirectional: 1. keys are summed up as in the forward pass: S, z 2. blocks of queries read them and are themselves
// summed up: R, y 3. chunks of keys read those. Causal: 1. keys are summed up, keeping the sums before every segment 2.
// segments, last first: the sums before each of their chunks are computed again, then chunks are processed from the
// last to the first, with the sums of the keys before them and of the queries after them. Segments have separate sums,
// as in the forward pass, and for the same reasons.
#pragma once

#include <attn/kernel/detail/gate_gradients.hpp>
#include <attn/kernel/detail/key_rows_backward.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <class T>
struct head_backward {
  using sums_type = kernel_sums<T>;

  const kernel_backward<T>& in;
  const kernel_call<T>& call = in.call;
  const attention_shape& shape = call.shape;
  bool store_before = true;  // workers keep the sums of the keys before each segment

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
};

}}}  // namespace attn::ATTN_ISA::detail
