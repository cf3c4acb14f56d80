// attn: the driver of full_softmax_backward. For each wave of key heads:
//   1. keys and values are packed once
//   2. for every query head of the group rows are packed, and all rows attend to one segment of keys after another;
//      dK and dV belong to their segment, and the segments' sums of dQ are added in order
#pragma once

#include <attn/softmax/detail/full_softmax_run.hpp>
#include <attn/softmax/detail/softmax_backward_call.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {
/// Keys of a segment, which has a separate sum of dq: an eighth of the keys, at least 512. It depends on the shape
/// only, so that threads do not change the sums.
inline idx_t backward_segment(idx_t keys) {
  return round_up(std::clamp<idx_t>(ceil_div(keys, 8), 512, 32768), backward_key_block);
}

template <class S, class Score, class ScoreBackward, class G>
struct full_softmax_backward_driver {
  using T = compute_type<S>;
  using P = product_type<S>;
  static constexpr idx_t pack_step = 512, fixed_segment = 1024;

  const softmax_backward_call<S, Score, ScoreBackward, G>& in;
  const attention_shape& shape = in.shape;
  const sequence_lengths& lengths = in.forward.lengths;

  /// Memory that the threads share for one key head.
  struct head_scratch {
    backward_keys<P> keys;
    backward_rows<P> rows;  // of the query head in progress
    T* dq;                  // [parts + 1][Lq][dq_stride]: sums of all segments that are done, and of those in progress
    T* slopes;              // [parts]: the sums of the segments in progress of the gradient of the slope,
    double* sums;           // [parts][head_entries()]: and of the other parameters of the head
    T* tables;              // [parts][table_size()]
    T* d_relative;          // as dq, of the queries of relative keys
  };

  idx_t dq_stride() const { return round_up(shape.dim, panel_width<T>); }
  idx_t dq_size() const { return round_up(shape.queries, max_rows) * dq_stride(); }
  /// Of an invariant execution they do not depend on the shape either: a row of dq gets the sums that it gets over
  /// fewer keys.
  idx_t segment() const { return in.forward.exec.invariant() ? fixed_segment : backward_segment(shape.keys); }
  idx_t segments() const { return ceil_div(shape.keys, segment()); }
  idx_t row_blocks() const { return ceil_div(shape.queries, max_rows); }
  /// The same of a batch item, by its true lengths.
  idx_t segments(idx_t b) const { return ceil_div(lengths.keys(b), segment()); }
  idx_t row_blocks(idx_t b) const { return ceil_div(lengths.queries(b), max_rows); }
  /// Rows of dq that blocks of this item up to number `block` write: the last one whole tiles.
  idx_t rows_to(idx_t b, idx_t block) const {
    return (std::min)((block + 1) * max_rows, round_up(lengths.queries(b), tile_rows));
  }
  idx_t most_segments(const wave<head_scratch>& key_heads) const {
    idx_t most = 0;
    for (idx_t n = 0; n < key_heads.count; ++n) most = (std::max)(most, segments(item_of(key_heads.first + n)));
    return most;
  }
  idx_t item_of(idx_t key_head) const { return key_head / shape.kv_heads; }

  head_scratch layout(arena& memory, idx_t parts) const {
    return {.keys = backward_keys<P>::layout(memory, shape.keys, shape.dim, shape.dim_v, bool(in.dk), bool(in.dv),
                                           many_queries(shape.queries)),
            .rows = backward_rows<P>::layout(memory, shape.queries, shape.dim, shape.dim_v,
                                             bool(in.terms().by_distance)),
            .dq = in.dq ? memory.allocate<T>((parts + 1) * dq_size()) : nullptr,
            .slopes = memory.allocate<T>(parts), .sums = memory.allocate<double>(parts * in.head_entries()),
            .tables = memory.allocate<T>(parts * in.table_size()),
            .d_relative = in.d_relative_queries ? memory.allocate<T>((parts + 1) * dq_size()) : nullptr};
  }

  /// One segment of keys with all rows of a head, which is number `part` of those in progress.
  void add_segment(idx_t b, idx_t h, idx_t number, const head_scratch& s, idx_t part, int worker) const {
    const idx_t begin = number * segment(), keys = lengths.keys(b), queries = lengths.queries(b),
                end = (std::min)(begin + segment(), keys), shift = in.forward.shift(b);
    const auto scratch = in.forward.exec.scratch(worker, [&](arena& memory) { return in.layout_scratch(memory); });
    T* const dq = in.dq ? s.dq + (part + 1) * dq_size() : nullptr;
    T* const d_relative = in.d_relative_queries ? s.d_relative + (part + 1) * dq_size() : nullptr;
    T* const table = s.tables + part * in.table_size();
    for (T* x : {dq, d_relative})
      if (x) std::fill_n(x, rows_to(b, row_blocks(b)) * dq_stride(), T(0));
    std::fill_n(table, in.table_size(), T(0));
    const auto head_terms = in.forward.terms_for(b, h);
    auto back = in.back(head_terms);
    double* const sums = s.sums + part * in.head_entries();
    std::fill_n(sums, in.head_entries(), 0.0);
    back.relative = in.relative_list(sums, 0);
    back.decay = in.decay_list(sums);
    back.d_positions = in.position_sums(table);
    back.rows = in.row_list(sums);
    key_range ranges[max_rows];
    for (idx_t from = begin; from < end; from += backward_key_block)
      for (idx_t i0 = 0; i0 < queries; i0 += max_rows) {
        const idx_t count = (std::min)(max_rows, queries - i0);
        for (idx_t r = 0; r < count; ++r) ranges[r] = in.seen_by(i0 + r + shift, keys);
        const auto rows_of = [&](T* x) { return x ? x + i0 * dq_stride() : nullptr; };
        back.by_distance = in.distance_sums(table, rows_of(dq), rows_of(d_relative), dq_stride());
        backward_block(s.rows.from(i0), count, ranges, {i0, 1, nullptr}, s.keys, from,
                       (std::min)(from + backward_key_block, end), head_terms, scratch, rows_of(dq), dq_stride(), back);
      }
    s.slopes[part] = back.d_slope();
  }

  /// Query head `in_group` of the group of every key head.
  void attend_heads(const wave<head_scratch>& key_heads, idx_t in_group, idx_t parts) const {
    const auto query_head = [&](idx_t key_head) { return key_head % shape.kv_heads * shape.group() + in_group; };
    key_heads.for_each(row_blocks(), [&](idx_t key_head, const head_scratch& s, idx_t block, int) {
      const idx_t b = item_of(key_head), h = query_head(key_head), i0 = block * max_rows;
      const idx_t count = (std::min)(max_rows, lengths.queries(b) - i0);
      if (count <= 0) return;
      in.pack_rows(s.rows.from(i0), b, h, head_of(in.q, b, h), {i0, 1, nullptr}, count);
      for (T* x : {s.dq, s.d_relative})
        if (x) std::fill_n(x + i0 * dq_stride(), (rows_to(b, block) - i0) * dq_stride(), T(0));
    });
    for (idx_t first = 0, end = most_segments(key_heads); first < end; first += parts) {
      const idx_t together = (std::min)(parts, end - first);
      const auto parts_of = [&](idx_t b) { return std::clamp(segments(b) - first, idx_t(0), parts); };
      key_heads.for_each(together, [&](idx_t key_head, const head_scratch& s, idx_t n, int worker) {
        // Of a causal call the first segments have most rows: they go first.
        const idx_t b = item_of(key_head);
        if (n < parts_of(b)) add_segment(b, query_head(key_head), first + n, s, n, worker);
      });
      for (idx_t n = 0; n < key_heads.count; ++n) {
        const idx_t b = item_of(key_heads.first + n), head = b * shape.heads + query_head(key_heads.first + n);
        const head_scratch& s = key_heads.scratch[n];
        for (idx_t part = 0; part < parts_of(b); ++part) {
          if (in.d_slopes) in.slope_sums[head] += s.slopes[part];
          in.add_sums(head, s.sums + part * in.head_entries(), in.head_entries());
          in.add_table(head, s.tables + part * in.table_size());
        }
      }
      if (!in.dq && !in.d_relative_queries) continue;
      key_heads.for_each(row_blocks(), [&](idx_t key_head, const head_scratch& s, idx_t block, int) {
        const idx_t b = item_of(key_head), count = block < row_blocks(b) ? parts_of(b) : 0;
        for (T* x : {s.dq, s.d_relative}) {
          if (!x || count == 0) continue;
          const sums_in_parts<T> sums{x, count + 1, round_up(shape.queries, max_rows), dq_stride()};
          for (idx_t n = 1; n <= count; ++n) sums.add_part(n, block * max_rows, rows_to(b, block));
        }
      });
    }
    if (in.dq || in.d_relative_queries)
      key_heads.for_each(row_blocks(), [&](idx_t key_head, const head_scratch& s, idx_t block, int) {
        const idx_t b = item_of(key_head), i0 = block * max_rows;
        const auto store = [&](const T* sums, const auto& to) {
          if (to)
            store_gradient_rows(sums, dq_stride(), in.terms().scale, head_of(to, b, query_head(key_head)), i0,
                                (std::min)(i0 + max_rows, shape.queries), lengths.queries(b), in.accumulate);
        };
        store(s.dq, in.dq), store(s.d_relative, in.d_relative_queries);
      });
  }

  void attend_wave(const wave<head_scratch>& key_heads, idx_t parts) const {
    key_heads.for_each(ceil_div(shape.keys, pack_step), [&](idx_t key_head, head_scratch& s, idx_t step, int) {
      const idx_t b = item_of(key_head), h = key_head % shape.kv_heads, begin = step * pack_step;
      const idx_t end = (std::min)(begin + pack_step, lengths.keys(b));
      if (begin < end) s.keys.pack(head_of(in.k, b, h), head_of(in.v, b, h), begin, end);
    });
    line_prefetcher next;
    if (key_heads.count == 1 && prefetch_short(key_heads.first + 1, next)) {
      backward_keys<P>& keys = key_heads.scratch->keys;
      keys.keys.next = keys.values.next = &next;
    }
    for (idx_t in_group = 0; in_group < shape.group(); ++in_group) attend_heads(key_heads, in_group, parts);
    key_heads.for_each(ceil_div(shape.keys, pack_step), [&](idx_t key_head, const head_scratch& s, idx_t step, int) {
      const idx_t b = item_of(key_head), h = key_head % shape.kv_heads, begin = step * pack_step;
      s.keys.store(in.dk, in.dv, b, h, begin, (std::min)(begin + pack_step, shape.keys), lengths.keys(b),
                   in.terms().scale, in.accumulate);
    });
  }

  /// Whether `rows` fetches the rows of a key head and of its first query head.
  bool prefetch_short(idx_t key_head, line_prefetcher& rows) const {
    const idx_t b = item_of(key_head), kv = key_head % shape.kv_heads, h = kv * shape.group();
    if (b == shape.batch || !is_short<S>(shape)) return false;
    rows.add(head_of(in.k, b, kv), 0, lengths.keys(b)), rows.add(head_of(in.v, b, kv), 0, lengths.keys(b));
    rows.add(head_of(in.q, b, h), 0, lengths.queries(b)), rows.add(head_of(in.d_out, b, h), 0, lengths.queries(b));
    return true;
  }

  void run() const {
    execution& exec = in.forward.exec;
    const idx_t key_heads = shape.batch * shape.kv_heads, threads = exec.active_threads();
    // A bias that is broadcast over heads or batch items gets their gradients one by one, in order.
    const bool in_order = in.d_bias && ((in.d_bias.extent(0) == 1 && shape.batch > 1) ||
                                        (in.d_bias.extent(1) == 1 && shape.kv_heads > 1));
    const idx_t bytes = static_cast<idx_t>(sizeof(T)) * 3 * (shape.keys + shape.queries) * (shape.dim + shape.dim_v);
    // Threads share the segments of a key head rather than take a key head each: fewer packed keys compete for the
    // caches.
    const idx_t enough = ceil_div(4 * threads, std::max<idx_t>(1, segments()));
    const idx_t size = in_order ? std::min<idx_t>(1, key_heads)
                                : (std::min)({wave_size(exec, key_heads, bytes), enough, key_heads});
    const auto parts_of = [&](idx_t count) {
      return count % threads == 0 || count >= 4 * threads ? 1 : std::clamp<idx_t>(segments(), 1, 8);
    };
    const idx_t most = size > 0 ? (std::max)(parts_of(size), parts_of(key_heads % size)) : 1;
    for (const auto& w : waves_of(exec, key_heads, size, [&](arena& memory) { return layout(memory, most); }))
      attend_wave(w, parts_of(w.count));
  }
};
template <class S, class Score, class ScoreBackward, class G>
void run_full_softmax_backward(softmax_backward_call<S, Score, ScoreBackward, G>& call) {
  const attention_shape& s = call.shape;
  if (!call.accumulate && call.d_bias) clear_gradient(call.d_bias);
  const double share = call.forward.causal ? 0.5 : 1.0,
               visible = static_cast<double>(s.queries) * static_cast<double>(s.keys) * share;
  softmax_backward_work work(call, 2.5 * s.operations_per_score() * visible);
  if (work.needs_lse()) full_softmax_driver<S, Score>{call.forward}.run();
  full_softmax_backward_driver<S, Score, ScoreBackward, G>{call}.run();
  work.store_parameters();
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN(S) void run_full_softmax_backward(softmax_backward_call<S, no_score, no_score_backward>&)
#include <attn/core/detail/compiled.hpp>
