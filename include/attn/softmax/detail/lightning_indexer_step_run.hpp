// attn: the driver of lightning_indexer_step: query by query, with the rows of the keys of a cache read where they lie.
// Where there are fewer queries than threads, the blocks of a query are divided: what is chosen does not depend on it.
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

  using lists = std::span<named_blocks<T>>;

  /// The best names of query i among the keys [begin, end).
  void choose(idx_t b, idx_t i, idx_t begin, idx_t end, const lists& named, int worker) const {
    struct scratch {
      stream_queries<T, C> queries;
      T* scores;
    };
    scratch s = in.exec.scratch(worker, [&](arena& memory) {
      return scratch{stream_queries<T, C>::layout(memory, shape.heads, shape.dim, 0), memory.allocate<T>(stream_tile)};
    });
    const idx_t of_list = in.heads_of_list(), below = in.end_of(b, i);
    const cache_rows<const C> keys(in.k, b, 0, shape.dim, true, in.pages);
    s.queries.rotated = in.rotated_keys;
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
      idx_t h = 0;
      for (named_blocks<T>& names : named) {
        for (idx_t n = 0; n < count; n += width<T>) {
          packet<T> sum = zero<T>();
          for (idx_t head = h; head < h + of_list; ++head)
            sum = add(sum, mul(in.activated(load<T>(s.queries.scores + head * stream_tile + n)),
                               broadcast<T>(in.weight(b, i, head))));
          store<T>(s.scores + n, sum);
        }
        names.take(s.scores, begin, count, below);
        h += of_list;
      }
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
    const auto layout = [&](arena& memory) { return layout_lists<T>(memory, in, in.lists()); };
    const auto named = in.exec.workspace([&](arena& memory) { return scored_keys<T>::layout(memory, in.topk); });
    // An item is a part of a query.
    const idx_t together = parts == 1 ? threads : parts * queries;
    for (const auto& some : waves_of(in.exec, queries * parts, together, layout)) {
      some.for_each(1, [&](idx_t item, const lists& all, idx_t, int worker) {
        const idx_t b = item / parts / shape.queries, i = item / parts % shape.queries, part = item % parts;
        const bool real = i < in.lengths.queries(b);
        for (named_blocks<T>& names : all) names.begin(real ? in.forced_of(b, i) : forced_names{}, in.topk);
        if (!real) return;
        const idx_t end = in.end_of(b, i), blocks = ceil_div(end, in.block);
        choose(b, i, blocks * part / parts * in.block, (std::min)(end, blocks * (part + 1) / parts * in.block), all,
               worker);
      });
      for (idx_t n = 0; n < some.count; n += parts) {
        const idx_t query = (some.first + n) / parts, b = query / shape.queries, i = query % shape.queries;
        if (i >= in.lengths.queries(b)) {
          in.clear_padding(b, i, i + 1);
          continue;
        }
        for (idx_t list = 0; list < in.lists(); ++list) {
          named_blocks<T>& names = some.scratch[n][static_cast<std::size_t>(list)];
          for (idx_t part = 1; part < parts; ++part)
            names.merge(some.scratch[n + part][static_cast<std::size_t>(list)]);
          in.store(b, list, i, names.finish(*named));
        }
      }
    }
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
  const indexer_call<S, C> over{
      call.q,        keys,         call.exec,         call.shape,        call.lengths,  call.seen,
      call.topk,     call.block,   call.local_blocks, call.first_blocks, call.per_head, call.scale,
      call.activation, call.w,     call.indices,      call.scores,       pages,
      call.rotated_keys};
  indexer_rows<S, C>{over}.run();
}

/// The keys of a call become all that a cache has; item b has lengths[b] queries.
template <class S, class Cache>
void set_keys_of_cache(indexer_call<S>& call, const Cache& cache, list_view<idx_t> lengths) {
  call.shape.keys = cache.tokens(), call.rotated_keys = cache.rotated();
  call.lengths = {call.shape.queries, call.shape.keys, lengths, cache.lengths()};
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN(S) void run_lightning_indexer_step(indexer_call<S>&, const tensor_view<const S>&, const page_tables&)
#include <attn/core/detail/compiled.hpp>
#define ATTN_RUN_OVER(S, C) void run_lightning_indexer_step(indexer_call<S>&, const tensor_view<const C>&,             \
  const page_tables&)
#include <attn/core/detail/compiled.hpp>
