// attn: the driver of lightning_indexer.
//   1. the keys of a batch item are packed, some at a time
//   2. for every tile of queries, for every part of the keys, for every list: the products of its heads, each through
//      its activation and added up where it is computed, then the best names of every query are kept (named_blocks.hpp)
#pragma once

#include <attn/core/detail/waves.hpp>
#include <attn/softmax/detail/blockwise.hpp>
#include <attn/softmax/detail/named_blocks.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {
template <class S>
struct lightning_indexer_driver {
  using T = compute_type<S>;
  static constexpr idx_t pack_step = 512;
  static constexpr idx_t most_scores = 2048;  // of a query at a time: with those of a tile they fit in the second cache

  const indexer_call<S>& in;
  const attention_shape& shape = in.shape;

  struct scratch {
    T *queries, *weights;           // per head: [dim][tile_rows], [tile_rows]
    T* scores;                      // [tile_rows][row_stride()]
    scored_keys<T> named;           // [topk]
    std::span<named_blocks<T>> lists;  // [lists][tile_rows]
  };
  scratch layout(arena& memory) const {
    return {.queries = memory.allocate<T>(shape.heads * tile_rows * shape.dim),
            .weights = memory.allocate<T>(shape.heads * tile_rows),
            .scores = memory.allocate<T>(tile_rows * row_stride()),
            .named = scored_keys<T>::layout(memory, in.topk),
            .lists = layout_lists<T>(memory, in, in.lists() * tile_rows)};
  }

  /// No power of two, which rows would share their places in the cache by.
  idx_t row_stride() const { return (std::min)(round_up(shape.keys, panel_width<T>), most_scores) + width<T>; }

  /// Scores of M queries and the keys of `count` slots from `first` on, whole vectors, for one list.
  template <int M>
  void score_tile(idx_t list, const packed_keys<T>& keys, idx_t first, idx_t count, const scratch& s) const {
    const idx_t depth = shape.dim, of_list = in.heads_of_list(), first_head = list * of_list, stride = row_stride();
    if (of_list == 0)
      for (int m = 0; m < M; ++m) std::fill_n(s.scores + m * stride, count, T(0));
    for (idx_t n = 0; n < count; n += panel_width<T>)
      for (idx_t h = first_head; h < first_head + of_list; ++h) {
        const T* const weights = s.weights + h * tile_rows;
        tile_product<T, M, 2>(packed_rows<T>{s.queries + h * tile_rows * depth}, keys.key_panel(first + n), depth,
                              [&](auto m, auto vector, const auto& x) __attribute__((always_inline)) {
                                T* const to = s.scores + m * stride + n + vector * width<T>;
                                const packet<T> weighted = mul(in.activated(x), broadcast<T>(weights[m]));
                                store<T>(to, h == first_head ? weighted : add(load<T>(to), weighted));
                              });
      }
  }

  /// Queries [i, i + count) of a batch item.
  void choose(idx_t b, idx_t i, idx_t count, const packed_keys<T>& keys, const scratch& s) const {
    for (idx_t h = 0; h < shape.heads; ++h) {
      const auto q = head_of(in.q, b, h);
      pack_rows<T>([&](idx_t m) { return q.row(i + m); }, count, shape.dim, q.col_stride, in.scale,
                   s.queries + h * tile_rows * shape.dim);
      for (idx_t m = 0; m < tile_rows; ++m) s.weights[h * tile_rows + m] = m < count ? in.weight(b, i + m, h) : T(0);
    }
    const auto each_list = [&](const auto& body) {
      for (idx_t list = 0; list < in.lists(); ++list)
        for (idx_t m = 0; m < count; ++m) body(list, i + m, s.lists[static_cast<std::size_t>(list * tile_rows + m)]);
    };
    each_list([&](idx_t, idx_t query, auto& names) { names.begin(in.forced_of(b, query), in.topk); });
    const idx_t end = in.end_of(b, i + count - 1);
    for (idx_t from = 0; from < end; from += most_scores) {
      const idx_t some = (std::min)(most_scores, end - from);
      for (idx_t list = 0; list < in.lists(); ++list) {
        with_tile_height(count,
                         [&](auto M) { score_tile<M.value>(list, keys, from, round_up(some, panel_width<T>), s); });
        for (idx_t m = 0; m < count; ++m) {
          const idx_t below = in.end_of(b, i + m), seen = (std::min)(some, below - from);
          if (seen > 0)
            s.lists[static_cast<std::size_t>(list * tile_rows + m)].take(s.scores + m * row_stride(), from, seen,
                                                                         below);
        }
      }
    }
    each_list([&](idx_t list, idx_t query, auto& names) {
      in.store(b, list, query, names.finish(s.named));
    });
  }

  void run() const {
    const double pairs = static_cast<double>(shape.batch * shape.queries) * static_cast<double>(shape.keys);
    const auto limit =
        in.exec.limit_threads({.operations = 2 * pairs * static_cast<double>(shape.heads * (shape.dim + 2))});
    const auto layout_item = [&](arena& memory) { return packed_keys<T>::layout(memory, shape.keys, shape.dim, 0); };
    for (const auto& items : waves_of(in.exec, shape.batch, layout_item)) {
      items.for_each(ceil_div(shape.keys, pack_step), [&](idx_t b, packed_keys<T>& keys, idx_t step, int) {
        const auto k = head_of(in.k, b, 0);
        const idx_t begin = step * pack_step, end = (std::min)(begin + pack_step, in.lengths.keys(b));
        if (begin < end) keys.pack_keys([&](idx_t slot) { return k.row(begin + slot); }, k.col_stride, begin, end);
      });
      // The last queries of a causal call see most keys: they go first.
      const idx_t tiles = ceil_div(shape.queries, tile_rows);
      items.for_each(tiles, [&](idx_t b, const packed_keys<T>& keys, idx_t step, int worker) {
        const scratch s = in.exec.scratch(worker, [&](arena& memory) { return layout(memory); });
        const idx_t i = (tiles - 1 - step) * tile_rows, end = (std::min)(i + tile_rows, in.lengths.queries(b));
        if (i < end) choose(b, i, end - i, keys, s);
        in.clear_padding(b, i, i + tile_rows);
      });
    }
  }
};

template <class S>
void run_lightning_indexer(const indexer_call<S>& call) {
  lightning_indexer_driver<S>{call}.run();
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN(S) void run_lightning_indexer(const indexer_call<S>&)
#include <attn/core/detail/compiled.hpp>
