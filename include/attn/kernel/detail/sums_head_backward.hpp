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
struct sums_head_backward {
  using sums_type = kernel_sums<T>;

  const sums_kernel_backward<T>& in;
  const kernel_call<T>& call = in.forward;
  const sums_kernel<T>& kernel = in.kernel;
  const attention_shape& shape = call.shape;
  bool store_before = true;   // workers keep the sums of the keys before each segment
  bool earlier_keys = false;  // of causal calls: other processes have keys before the first

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
        memory, m, shape.dim_v, (std::max)(call.map->scratch_size, in.map->scratch_size), log_scaled, paired);
    w.x = kernel_backward_scratch<T>::layout(memory, forward, shape, m, log_scaled, call.gated(), paired);
    w.own = sums(), w.own_queries = sums(), w.after = sums(), w.later = sums();
    w.before = list(call.causal && store_before ? most_segments(shape.keys) : 0);
    w.seen = list(call.causal ? ceil_div((std::min)(segment_tokens(shape.keys), shape.keys), kernel_chunk) : 0);
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
      copy_sums(b, into);
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
    if (key_rows()) {
      row_prefetcher<> prefetch = in.prefetch_keys(b, h, begin, to.k, to.v);
      return attend_key_rows(in, b, h, begin, count, after, later_t, w.rows, to.k, to.v, prefetch);
    }
    in.load_chunk(b, h, begin, count, false, w.x);
    finish_keys(b, h, begin, count, &after, false, w, to);
  }

  /// Bidirectional, one head by one worker.
  void run_both(idx_t b, idx_t h, worker_scratch& w, const item_head_target& to) const {
    const auto& s = w.x.forward;
    const idx_t keys_here = call.lengths.keys(b), rows = call.lengths.queries(b), step = segment_tokens(rows);
    sums_type& sums = w.later;
    sums.empty = w.after.empty = true;
    for (idx_t n = 0; n < call.segments(b); ++n)
      kernel.add_segment(sums, kernel.sum_up_segment(b, h, n, s, w.own), w.own, s);
    for (idx_t begin = 0; begin < rows; begin += step) {
      attend_rows(b, h, begin, (std::min)(begin + step, rows), sums, w.own, w.x, to.features);
      if (!w.own.empty) kernel.add_segment(w.after, T(1), w.own, s);
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
      join(w.before[n], kernel.sum_up_segment(b, h, n, s, w.own), w.own, w.before[n + 1], s.factors);
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
      kernel.add_segment(sums, decay, own, s);
  }

  /// Segment n, with the keys before it in `before`; its queries are summed up in w.own_queries. `sums_only`: nothing
  /// else is computed.
  T attend_segment(idx_t b, idx_t h, idx_t n, const sums_type& before, worker_scratch& w, const item_head_target& to,
                   bool sums_only = false) const {
    const idx_t begin = n * call.segment(b), end = call.end_of_segment(b, n);
    sum_before(b, h, begin, end, before, w);
    T decay = T(1);
    w.own_queries.clear();
    for (idx_t c = ceil_div(end - begin, kernel_chunk) - 1; c >= 0; --c) {
      const idx_t first = begin + c * kernel_chunk, last = (std::min)(first + kernel_chunk, end);
      decay *= sums_only ? attend_queries(b, h, first, last, w.seen[c], w, to, true)
                         : attend_chunk(b, h, first, last, w.seen[c], decay, w, to);
    }
    return decay;
  }

  /// What is kept of each chunk of a shared segment: `sums` are those of the keys of the segment before it, then those
  /// of the queries of the segment after it; k_d and dv what its own queries give its keys.
  struct kept_chunk {
    sums_type sums;
    T decay;  // of the sums of other segments
    T *k_d, *dv;
  };
  kept_chunk layout_chunk(arena& memory) const {
    const idx_t rows = in.of_keys() ? call.map->features + tile_rows : 0;
    const idx_t stride = round_up(shape.dim_v, panel_width<T>);
    return {call.allocate_sums(memory), T(1), memory.allocate<T>(rows * kernel_chunk),
            memory.allocate<T>(in.dv ? kernel_chunk * stride : 0)};
  }
  /// Where threads share heads, `own` becomes the sums of the keys of segment n; without those of the last chunk if it
  /// is the `last`.
  T sum_up_chunks(idx_t b, idx_t h, idx_t n, bool last, sums_type& own, const kernel_scratch<T>& s,
                  kept_chunk* kept) const {
    const idx_t end = call.end_of_segment(b, n);
    T decay = T(1);
    own.clear();
    for (idx_t c = n * call.segment(b); c < end; c += kernel_chunk, ++kept) {
      copy_sums(own, kept->sums);
      kept->decay = decay;
      if (!last || c + kernel_chunk < end)
        decay = kernel.add_keys_to(own, decay, b, h, c, (std::min)(c + kernel_chunk, end), s);
    }
    return decay;
  }
  /// The first half of attend_segment: `own` becomes the sums of the queries. `summed`: the keys are.
  T attend_queries_of(idx_t b, idx_t h, idx_t n, const sums_type& before, bool summed, worker_scratch& w,
                      const item_head_target& to, sums_type& own, kept_chunk* kept) const {
    const idx_t begin = n * call.segment(b), end = call.end_of_segment(b, n);
    if (!summed) sum_before(b, h, begin, end, before, w);
    T decay = T(1);
    std::swap(w.own_queries, own);
    w.own_queries.clear();
    for (idx_t c = ceil_div(end - begin, kernel_chunk) - 1; c >= 0; --c) {
      kept_chunk& x = kept[c];
      const sums_type& seen = !summed ? w.seen[c] : c > 0 ? w.seen[0] : before;
      if (summed && c > 0) join(before, x.decay, x.sums, w.seen[0], w.x.forward.factors);
      copy_sums(w.own_queries, x.sums);
      x.decay = decay;
      w.x.k_d = x.k_d, w.x.dv = x.dv;
      decay *= attend_queries(b, h, begin + c * kernel_chunk, (std::min)(begin + (c + 1) * kernel_chunk, end), seen, w,
                              to);
    }
    std::swap(w.own_queries, own);
    return decay;
  }
  /// The second half, chunk c: `w.after` has the sums of the queries of later segments.
  void attend_keys_of(idx_t b, idx_t h, idx_t n, idx_t c, worker_scratch& w, const item_head_target& to,
                      kept_chunk& kept) const {
    const idx_t begin = n * call.segment(b) + c * kernel_chunk, end = call.end_of_segment(b, n);
    if (begin >= end) return;
    const idx_t count = std::min<idx_t>(kernel_chunk, end - begin);
    in.load_chunk(b, h, begin, count, false, w.x);
    w.x.k_d = kept.k_d, w.x.dv = kept.dv;
    finish_keys(b, h, begin, count, sums_after(kept.decay, kept.sums, w), has_queries(b, begin + count), w, to);
  }

  /// The sums of the keys before every chunk of a segment.
  void sum_before(idx_t b, idx_t h, idx_t begin, idx_t end, const sums_type& before, worker_scratch& w) const {
    const auto& s = w.x.forward;
    const idx_t offset = call.lengths.keys(b) - call.lengths.queries(b);  // position of query 0
    T decay = T(1);
    w.own.clear();
    for (idx_t c = begin, n = 0; c < end; c += kernel_chunk, ++n) {
      if (c == begin)
        copy_sums(before, w.seen[n]);
      else if (c + kernel_chunk > offset || in.of_gates())  // it has queries
        join(before, decay, w.own, w.seen[n], s.factors);
      if (c + kernel_chunk < end) decay = kernel.add_keys_to(w.own, decay, b, h, c, c + kernel_chunk, s);
    }
  }

  /// Whether queries are at the positions of the last keys before `end`.
  bool has_queries(idx_t b, idx_t end) const { return end > call.lengths.keys(b) - call.lengths.queries(b); }

  /// The sums of the queries after a chunk: those of later segments, of which `decay` is left, and the segment's own;
  /// null if there are none.
  [[gnu::noinline]] const sums_type* sums_after(T decay, const sums_type& own, worker_scratch& w) const {
    if (own.empty && w.after.empty) return nullptr;
    if (own.empty) {
      if (decay == T(1)) return &w.after;
      copy_sums(w.after, w.later);  // no queries in the chunks between
      scale(w.later, decay);
    } else if (w.after.empty) {
      copy_sums(own, w.later);  // to which the queries of the chunk are added
    } else {
      combine(w.after, decay, own, w.later, w.x.forward.factors);
    }
    return &w.later;
  }

  /// Keys [begin, end) and the queries at their positions; `decay` is the product of the gates after them in the
  /// segment. Returns that of their own.
  T attend_chunk(idx_t b, idx_t h, idx_t begin, idx_t end, const sums_type& seen, T decay, worker_scratch& w,
                 const item_head_target& to) const {
    const auto& x = w.x;
    const idx_t count = end - begin;
    const sums_type* later = in.reverse() ? sums_after(decay, w.own_queries, w) : nullptr;
    const T of_sums = in.of_gates() && later && !seen.empty ? dot_sums(seen, *later) : T(0);
    const T own_decay = attend_queries(b, h, begin, end, seen, w, to);
    if (in.reverse()) finish_keys(b, h, begin, count, later, has_queries(b, end), w, to);
    if (in.of_gates()) {
      if (!later) std::fill_n(x.gate_keys, kernel_chunk, T(0));
      transpose_scores(x.gate_scores, count, x.products_t);
      gate_chunk<T>{count, call.complement, x.forward.gates, x.forward.decay, x.forward.score_factor, x.products_t,
                    x.gate_queries, x.gate_keys, of_sums}
          .add_to(w.gates + begin);
    }
    return own_decay;
  }

  /// The same without what later queries give the keys: k_d and dv are not stored. `sums_only`: of the queries alone.
  [[gnu::noinline]] T attend_queries(idx_t b, idx_t h, idx_t begin, idx_t end, const sums_type& seen,
                                     worker_scratch& w, const item_head_target& to, bool sums_only = false) const {
    const auto& x = w.x;
    const idx_t offset = call.lengths.keys(b) - call.lengths.queries(b), count = end - begin;
    const idx_t first = (std::max)(offset - begin, idx_t(0));  // lane of the first query in the chunk
    const bool queries = has_queries(b, end);
    in.load_chunk(b, h, begin, count, queries, x);
    if (in.of_gates()) {
      std::fill_n(x.gate_scores, kernel_chunk * kernel_chunk, T(0));
      std::fill_n(x.gate_queries, kernel_chunk, T(0));
    }
    const T own_decay = call.gated() ? x.forward.decay[count - 1] : T(1);
    const sums_type* before = queries && !seen.empty ? &seen : nullptr;
    sums_type* const own = in.reverse() && (begin > 0 || earlier_keys) ? &w.own_queries : nullptr;
    for (idx_t g = 0; g < call.group() && queries; ++g)
      in.attend_block({b, h, h * call.group() + g, begin - offset, first, count, count}, before, own,
                      g == 0 ? own_decay : T(1), x, to.features, sums_only);
    if (!queries) scale(w.own_queries, own_decay);
    return own_decay;
  }
  /// Adds what later queries give the keys of a chunk, if its own have given them some, and stores their gradients.
  void finish_keys(idx_t b, idx_t h, idx_t begin, idx_t count, const sums_type* later, bool added,
                   const worker_scratch& w, const item_head_target& to) const {
    row_prefetcher<> prefetch = in.prefetch_keys(b, h, begin, to.k, to.v);
    if (later)
      in.from_later(*later, count, added, prefetch, w.x);
    else if (!added)
      in.clear_gradients(w.x);
    if (in.of_keys() || in.dv) in.store_chunk(b, h, begin, count, to.k, to.v, to.features, w.x);
  }
};

}}}  // namespace attn::ATTN_ISA::detail
