// attn: the driver of lightning_indexer.
//   1. the keys of a batch item are packed, some at a time
//   2. for every tile of queries, for every block of keys: the products of all heads, each through its activation and
//      added up where it is computed, then the best keys of every query are kept (topk_keys.hpp)
#pragma once

#include <attn/core/detail/waves.hpp>
#include <attn/softmax/detail/blockwise.hpp>
#include <attn/softmax/detail/indexer_call.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {
template <class S>
struct lightning_indexer_driver {
  using T = compute_type<S>;
  static constexpr idx_t pack_step = 512;

  const indexer_call<S>& in;
  const attention_shape& shape = in.shape;

  struct scratch {
    T *queries, *weights;  // per head: [dim][tile_rows], [tile_rows]
    T* scores;             // [tile_rows][score_stride]
    topk_keys<T>* best;    // [tile_rows]
  };
  scratch layout(arena& memory) const {
    const idx_t room = topk_keys<T>::room_for(in.topk, shape.keys);
    candidate<T>*const upper = memory.allocate<candidate<T>>(room),
                *const lower = memory.allocate<candidate<T>>(room);
    return {.queries = memory.allocate<T>(shape.heads * tile_rows * shape.dim),
            .weights = memory.allocate<T>(shape.heads * tile_rows),
            .scores = memory.allocate<T>(tile_rows * score_stride),
            .best = memory.allocate_list(
                tile_rows, [&](arena& m) { return topk_keys<T>::layout(m, in.topk, shape.keys, upper, lower); })};
  }

  /// Scores of M queries and the keys of `count` slots from `first` on, whole vectors.
  template <int M>
  void score_tile(const packed_keys<T>& keys, idx_t first, idx_t count, const scratch& s) const {
    const idx_t depth = shape.dim;
    if (shape.heads == 0)
      for (int m = 0; m < M; ++m) std::fill_n(s.scores + m * score_stride, count, T(0));
    for (idx_t n = 0; n < count; n += panel_width<T>)
      for (idx_t h = 0; h < shape.heads; ++h) {
        const T* const weights = s.weights + h * tile_rows;
        tile_product<T, M, 2>(packed_rows<T>{s.queries + h * tile_rows * depth}, keys.key_panel(first + n), depth,
                              [&](auto m, auto vector, const auto& x) __attribute__((always_inline)) {
                                T* const to = s.scores + m * score_stride + n + vector * width<T>;
                                const packet<T> weighted = mul(in.activated(x), broadcast<T>(weights[m]));
                                store<T>(to, h == 0 ? weighted : add(load<T>(to), weighted));
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
    for (idx_t m = 0; m < count; ++m) s.best[m].clear();
    const idx_t end = in.end_of(b, i + count - 1);
    for (idx_t from = 0; from < end; from += key_block) {
      const idx_t some = (std::min)(key_block, end - from);
      with_tile_height(count, [&](auto M) { score_tile<M.value>(keys, from, round_up(some, panel_width<T>), s); });
      for (idx_t m = 0; m < count; ++m)
        if (const idx_t seen = (std::min)(some, in.end_of(b, i + m) - from); seen > 0)
          s.best[m].take(s.scores + m * score_stride, from, seen);
    }
    for (idx_t m = 0; m < count; ++m) {
      s.best[m].finish();
      in.store(b, i + m, s.best[m]);
    }
  }

  void run() const {
    const double pairs = static_cast<double>(shape.batch * shape.queries) * static_cast<double>(shape.keys);
    const auto limit =
        in.exec.limit_threads({.operations = 2 * pairs * static_cast<double>(shape.heads * (shape.dim + 2))});
    for_each_wave(
        in.exec, shape.batch, wave_size(in.exec, shape.batch, shape.keys * shape.dim * static_cast<idx_t>(sizeof(T))),
        [&](arena& memory) { return packed_keys<T>::layout(memory, shape.keys, shape.dim, 0); },
        [&](const wave<packed_keys<T>>& items) {
          items.for_each(ceil_div(shape.keys, pack_step), [&](idx_t b, packed_keys<T>& keys, idx_t step, int) {
            const auto k = head_of(in.k, b, 0);
            const idx_t begin = step * pack_step, end = (std::min)(begin + pack_step, in.lengths.keys(b));
            if (begin < end)
              keys.pack_keys([&](idx_t slot) { return k.row(begin + slot); }, k.col_stride, begin, end);
          });
          // The last queries of a causal call see most keys: they go first.
          const idx_t tiles = ceil_div(shape.queries, tile_rows);
          items.for_each(tiles, [&](idx_t b, const packed_keys<T>& keys, idx_t step, int worker) {
            const scratch s = in.exec.scratch(worker, [&](arena& memory) { return layout(memory); });
            const idx_t i = (tiles - 1 - step) * tile_rows, end = (std::min)(i + tile_rows, in.lengths.queries(b));
            if (i < end) choose(b, i, end - i, keys, s);
            in.clear_padding(b, i, i + tile_rows);
          });
        });
  }
};

template <class S>
void run_lightning_indexer(const indexer_call<S>& call) {
  lightning_indexer_driver<S>{call}.run();
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN(S) void run_lightning_indexer(const indexer_call<S>&)
#include <attn/core/detail/compiled.hpp>
