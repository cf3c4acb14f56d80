// attn: the driver of few queries over many keys, as in the steps of a cache. A task takes up to task_rows rows, the
// queries of some heads of one key head, through one chunk of the keys, by one of two kernels:
//
//   in place    rows in codes, and up to few_queries queries: the streaming kernel
//   in blocks   the blockwise kernel; block_keys keys at a time are packed, and attended by all rows while they are in
//               the second-level cache
//
// So the keys are read once, and scratch memory does not depend on their number. The chunks of a row are merged in
// order; kernels, chunks and blocks depend on the shape alone.
#pragma once

#include <attn/core/detail/waves.hpp>
#include <attn/softmax/detail/softmax_call.hpp>
#include <attn/softmax/detail/streaming.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <class S, class Score, class C, class P>
struct few_queries_driver {
  using T = compute_type<S>;

  static constexpr bool in_codes = coded<C>;
  static constexpr idx_t most_queries = 64;  // of a task
  static constexpr idx_t task_rows = 256;    // their states stay in the second-level cache
  static constexpr idx_t block_keys = 256;   // packed at a time

  const softmax_call<S, Score, C>& in;
  const attention_shape& shape = in.shape;
  const sequence_lengths& lengths = in.lengths;

  /// Whether the driver takes the queries of a batch item. More of them, and few keys, are attended sooner if all keys
  /// are packed once; rows in codes are multiplied faster as they are (64 queries: 0.53 of the time).
  static bool takes(const softmax_call<S, Score, C>& call, idx_t b) {
    if (in_codes) return true;
    const idx_t queries = call.lengths.queries(b);
    return !call.maximum && (in_place(queries) || (queries <= most_queries && call.lengths.keys(b) > 2 * block_keys));
  }
  static bool in_place(idx_t queries) { return in_codes || queries <= few_queries; }

  /// What a task attends: `queries` queries from `first` on of heads [head, head + heads), to keys [begin, end).
  struct work {
    idx_t batch, head, heads, first, queries, begin, end;
    idx_t rows() const { return heads * queries; }  // row r is query r % queries of a head
  };

  /// How the rows of all batch items are divided into tasks.
  const idx_t queries_of_task = std::clamp<idx_t>(shape.queries, 1, most_queries),
              heads_of_task = std::clamp<idx_t>(task_rows / queries_of_task, 1, std::max<idx_t>(1, shape.group())),
              parts = ceil_div(shape.group(), heads_of_task), runs = ceil_div(shape.queries, queries_of_task),
              chunks = std::max<idx_t>(1, ceil_div(shape.keys, stream_chunk));

  work of(idx_t task) const {
    const idx_t chunk = task % chunks, run = task / chunks % runs, part = task / chunks / runs % parts,
                key_head = task / chunks / runs / parts, b = key_head / shape.kv_heads, from = part * heads_of_task;
    work w{.batch = b, .head = key_head % shape.kv_heads * shape.group() + from,
           .heads = std::min(heads_of_task, shape.group() - from), .first = run * queries_of_task, .queries = 0,
           .begin = chunk * stream_chunk, .end = 0};
    if (takes(in, b)) w.queries = std::clamp<idx_t>(lengths.queries(b) - w.first, 0, queries_of_task);
    const idx_t all = lengths.keys(b), seen = in.causal ? in.shift(b) + w.first + w.queries : all;
    w.end = std::min(w.begin + stream_chunk, std::clamp<idx_t>(seen, 0, all));
    return w;
  }

  void run() const {
    const idx_t tasks = shape.batch * shape.kv_heads * parts * runs * chunks, threads = in.exec.active_threads();
    const auto layout = [&](arena& memory) {
      return online_softmax<T>::layout(memory, heads_of_task * queries_of_task, shape.dim_v);
    };
    const auto workspace = in.exec.workspace(layout);
    online_softmax<T> total = *workspace;  // of the rows in progress, which may continue in the next wave
    for_each_wave(in.exec, tasks, threads == 1 ? 1 : 4 * threads, layout, [&](const wave<online_softmax<T>>& some) {
      some.for_each(1, [&](idx_t task, online_softmax<T>& state, idx_t, int worker) {
        const work w = of(task);
        state.rows = w.rows();
        state.clear();
        if (w.rows() == 0 || w.begin >= w.end) return;
        if constexpr (in_codes)
          attend_in_place(w, state, worker);
        else
          in_place(lengths.queries(w.batch)) ? attend_in_place(w, state, worker) : attend_in_blocks(w, state, worker);
      });
      for (idx_t n = 0; n < some.count; ++n) {
        const idx_t chunk = (some.first + n) % chunks;
        const work w = of(some.first + n);
        total.rows = w.rows();
        if (chunk == 0) total.clear();
        total.merge(some.scratch[n]);
        if (chunk + 1 < chunks) continue;
        for (idx_t r = 0; r < total.rows; ++r)
          in.finish_row(total, r, w.batch, w.head + r / w.queries, w.first + r % w.queries);
      }
    });
  }

  void attend_in_place(const work& w, const online_softmax<T>& state, int worker) const {
    auto rows = in.exec.scratch(worker, [&](arena& memory) {
      return stream_queries<T, C>::layout(memory, heads_of_task * queries_of_task, shape.dim, shape.dim_v,
                                          bool(in.relative_queries));
    });
    const idx_t b = w.batch, kv = w.head / shape.group();
    rows.begin(in.q, in.relative_queries, b, w.head, w.rows(), w.queries, in.terms.query_factor(), w.first);
    const auto limit = in.causal ? stream_limit{in.shift(b) + 1, 1} : stream_limit{lengths.keys(b), 0};
    attend_stream(rows, in.key_rows(b, kv), in.value_rows(b, kv), {}, w.begin, w.end,
                  in.terms.for_head(b, 0, in.shift(b)), limit, state, in.visible_keys(b));
  }

  void attend_in_blocks(const work& w, const online_softmax<T>& state, int worker) const {
    // Terms are those of one head; without any, short tiles of several heads become tall ones.
    const bool alone = in.terms.any() || in.terms.dropout || in.terms.by_distance;
    const idx_t heads = alone ? 1 : std::min(w.heads, max_rows / w.queries), count = ceil_div(w.heads, heads);
    struct scratch {
      packed_keys<P> keys;
      row_block<P>* rows;
    };
    const scratch s = in.exec.scratch(worker, [&](arena& memory) {
      return scratch{packed_keys<P>::layout(memory, block_keys, shape.dim, shape.dim_v),
                     memory.allocate_list(count, [&](arena& m) {
                       return row_block<P>::layout(m, shape.dim, shape.dim_v, bool(in.terms.by_distance),
                                                   round_up(heads * w.queries, tile_rows));
                     })};
    });
    const idx_t b = w.batch, kv = w.head / shape.group();
    const auto keys = in.key_rows(b, kv);
    const auto values = in.value_rows(b, kv);
    for (idx_t n = 0; n < count; ++n) {
      const idx_t h = w.head + n * heads, rows = std::min(heads, w.heads - n * heads) * w.queries;
      const index_map which{w.first, 1, nullptr};
      if (alone)
        in.begin(s.rows[n], b, h, in.query(b, h), which, rows);
      else
        s.rows[n].begin([&](idx_t r) { return in.query(b, h + r / w.queries).row(w.first + r % w.queries); },
                        in.q.stride(3), which, rows, in.terms.query_factor());
    }

    packed_keys<P> packed = s.keys;
    line_prefetcher next[] = {{keys, w.begin}, {values, w.begin}};
    packed.next = next;
    for (idx_t begin = w.begin; begin < w.end; begin += block_keys) {
      const idx_t end = std::min(begin + block_keys, w.end);
      for (line_prefetcher& rows : next) rows.set_end(std::min(end + block_keys, in.visible_keys(b)));
      packed.positions = {begin, 1, nullptr};
      for (idx_t j = begin, some = packed.wide; j < end; j += some) {
        for (line_prefetcher& rows : next) rows.fetch(j + 3 * some);
        packed.pack(keys, values, j - begin, std::min(j + some, end) - begin);
      }
      for (idx_t n = 0; n < count; ++n) {
        row_block<P>& block = s.rows[n];
        for (idx_t r = 0; r < block.rows; ++r) {
          const idx_t seen = in.causal ? w.first + r % w.queries + in.shift(b) + 1 : end;
          block.ranges[r] = {0, std::clamp(seen, begin, end) - begin};
        }
        attend(block, packed, in.terms.for_head(b, w.head + n * heads, in.shift(b)));
      }
    }
    for (idx_t n = 0, row = 0; n < count; ++n)
      for (idx_t r = 0; r < s.rows[n].rows; ++r) state.copy_row(row++, s.rows[n].state, r);
  }
};

}}}  // namespace attn::ATTN_ISA::detail
