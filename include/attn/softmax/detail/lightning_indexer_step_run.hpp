// attn: the driver of lightning_indexer_step: query by query, with the rows of the keys of a cache read where they lie.
// Where there are fewer queries than threads, the keys of a query are divided: what is chosen does not depend on it.
#pragma once

#include <attn/softmax/detail/lightning_indexer_run.hpp>
#include <attn/softmax/detail/scattered_stream.hpp>
#include <attn/softmax/detail/streaming.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <class S, class C>
struct indexer_rows {
  using T = compute_type<S>;
  static constexpr idx_t tile = stream_tile_of<C>;

  const indexer_call<S, C>& in;
  const attention_shape& shape = in.shape;

  /// The best keys of query i among [begin, end).
  void choose(idx_t b, idx_t i, idx_t begin, idx_t end, topk_keys<T>& best, int worker) const {
    struct scratch {
      stream_queries<T, C> queries;
      T* scores;
    };
    scratch s = in.exec.scratch(worker, [&](arena& memory) {
      return scratch{stream_queries<T, C>::layout(memory, shape.heads, shape.dim, 0), memory.allocate<T>(stream_tile)};
    });
    const cache_rows<const C> keys(in.k, b, 0, shape.dim, true, in.pages);
    s.queries.begin(in.q.slice(2, i, 1), {}, {b, 0, 0, 0}, shape.heads, 1, in.scale);
    for (idx_t count; begin < end; begin += count) {
      const auto rows = rows_from(keys, begin);
      count = alike(rows, (std::min)({tile, end - begin, rows.rows}));
      const auto next = begin + count < end ? rows_from(keys, begin + count) : decltype(rows_from(keys, begin)){};
      with_whole_packets<T>(rows, count, s.queries.keys, true, [&](const auto& k) {
        by_rows<T>(s.queries.rows, [&](idx_t r, auto R) {
          stream_scores<R.value>(s.queries.row(r), k, s.queries.scores + r * stream_tile,
                                 prefetcher_of(next, 0, r == 0 ? (std::min)(tile, next.rows) : 0));
        });
      });
      for (idx_t n = 0; n < count; n += width<T>) {
        packet<T> sum = zero<T>();
        for (idx_t h = 0; h < shape.heads; ++h)
          sum = add(sum, mul(in.activated(load<T>(s.queries.scores + h * stream_tile + n)),
                             broadcast<T>(in.weight(b, i, h))));
        store<T>(s.scores + n, sum);
      }
      best.take(s.scores, begin, count);
    }
  }

  void run() const {
    const double keys = static_cast<double>(shape.batch * shape.keys);
    const auto limit = in.exec.limit_threads(
        {.operations = 2 * keys * static_cast<double>(shape.queries * shape.heads * (shape.dim + 2)),
         .bytes = keys * static_cast<double>(shape.dim * static_cast<idx_t>(sizeof(C)))});
    const idx_t queries = shape.batch * shape.queries, threads = in.exec.active_threads();
    const idx_t parts = std::clamp<idx_t>(ceil_div(threads, std::max<idx_t>(1, queries)), 1,
                                          std::max<idx_t>(1, shape.keys / stream_chunk));
    const idx_t room = topk_keys<T>::room_for(in.topk, shape.keys);
    const auto layout = [&](arena& memory) {
      candidate<T>*const upper = memory.allocate<candidate<T>>(room),
                  *const lower = memory.allocate<candidate<T>>(room);
      return topk_keys<T>::layout(memory, in.topk, shape.keys, upper, lower);
    };
    // An item is a part of a query.
    const idx_t together = parts == 1 ? threads : parts * queries;
    for_each_wave(in.exec, queries * parts, together, layout, [&](const wave<topk_keys<T>>& some) {
      some.for_each(1, [&](idx_t item, topk_keys<T>& best, idx_t, int worker) {
        const idx_t b = item / parts / shape.queries, i = item / parts % shape.queries, part = item % parts;
        best.clear();
        if (i >= in.lengths.queries(b)) return;
        const idx_t end = in.end_of(b, i);
        choose(b, i, end * part / parts, end * (part + 1) / parts, best, worker);
      });
      for (idx_t n = 0; n < some.count; n += parts) {
        topk_keys<T>& best = some.scratch[n];
        for (idx_t part = 1; part < parts; ++part) best.merge(some.scratch[n + part]);
        best.finish();
        const idx_t query = (some.first + n) / parts;
        in.store(query / shape.queries, query % shape.queries, best);
      }
    });
  }
};

/// A call over the keys of a cache; many queries, as a whole call.
template <class S, class C>
void run_lightning_indexer_step(indexer_call<S>& call, const tensor_view<const C>& keys, const page_tables& pages) {
  if constexpr (std::same_as<S, C>)
    if (call.shape.queries > queries_in_place && !pages) {
      call.k = keys;
      return run_lightning_indexer(call);
    }
  const indexer_call<S, C> over{call.q, keys, call.exec, call.shape, call.lengths, call.causal, call.topk, call.scale,
                                call.activation, call.w, call.indices, call.scores, pages};
  indexer_rows<S, C>{over}.run();
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN(S) void run_lightning_indexer_step(indexer_call<S>&, const tensor_view<const S>&, const page_tables&)
#include <attn/core/detail/compiled.hpp>
#define ATTN_RUN_OVER(S, C) void run_lightning_indexer_step(indexer_call<S>&, const tensor_view<const C>&,             \
  const page_tables&)
#include <attn/core/detail/compiled.hpp>
