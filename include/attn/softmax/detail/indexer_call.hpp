// attn: lightning_indexer.hpp: its checks and its driver.
//   1. the keys of a batch item are packed, some at a time
//   2. for every tile of queries, for every block of keys: the products of all heads, each through its activation and
//      added up where it is computed, then the best keys of every query are kept (topk_keys.hpp)
#pragma once

#include <attn/core/detail/attention_call.hpp>
#include <attn/core/detail/cache_rows.hpp>
#include <attn/core/detail/waves.hpp>
#include <attn/core/index_view.hpp>
#include <attn/softmax/detail/blockwise.hpp>
#include <attn/softmax/detail/topk_keys.hpp>

namespace attn { inline namespace ATTN_ISA {

/// What products become before the heads are added up.
enum class indexer_activation { relu, none };

namespace detail {

/// A checked call; C: the elements of the keys.
template <class S, class C = S>
struct indexer_call {
  using T = compute_type<S>;

  tensor_view<const S> q;
  tensor_view<const C> k;
  attention_shape shape;  // heads: those of the indexer; one key head
  sequence_lengths lengths;
  bool causal;
  idx_t topk;
  T scale;
  indexer_activation activation;
  tensor_view<const T, 3> w;
  index_output indices;
  tensor_view<T> scores;
  page_tables pages{};

  idx_t shift(idx_t b) const { return lengths.keys(b) - lengths.queries(b); }
  /// Query i sees the keys below.
  idx_t end_of(idx_t b, idx_t i) const {
    const idx_t all = lengths.keys(b);
    return causal ? std::clamp<idx_t>(i + shift(b) + 1, 0, all) : all;
  }
  T weight(idx_t b, idx_t i, idx_t h) const { return w ? w(b, i, h) : T(1); }
  packet<T> activated(const packet<T>& x) const {
    return activation == indexer_activation::relu ? (max)(x, zero<T>()) : x;  // NaN stays
  }

  /// Stores the keys of query i, and -1 behind them.
  void store(idx_t b, idx_t i, const topk_keys<T>& best) const {
    indices.typed([&](const auto& to) {
      using index = typename std::remove_cvref_t<decltype(to)>::value_type;
      for (idx_t n = 0; n < topk; ++n) to(b, 0, i, n) = static_cast<index>(n < best.count ? best.list[n].key() : -1);
    });
    for (idx_t n = 0; scores && n < topk; ++n)
      scores(b, 0, i, n) = n < best.count ? best.list[n].score() : -std::numeric_limits<T>::infinity();
  }
  void clear_padding(idx_t b, idx_t begin, idx_t end) const {
    const topk_keys<T> none;
    for (idx_t i = (std::max)(begin, lengths.queries(b)); i < (std::min)(end, shape.queries); ++i) store(b, i, none);
  }
};

/// What whole calls, steps and backward passes share, checked; the views that are written follow.
template <class S, class Options>
indexer_call<S> indexer_inputs(call_views& views, const tensor_view<const S>& q, const tensor_view<const S>& k,
                              const Options& options) {
  views.read("q", q), views.read("k", k);
  const attention_shape s{.batch = q.extent(0), .heads = q.extent(1), .kv_heads = 1, .queries = q.extent(2),
                          .keys = k.extent(2), .dim = q.extent(3), .dim_v = 0};
  views.extents({{"key batch = query batch", s.batch, k.extent(0)},
                 {"key heads", 1, k.extent(1)},
                 {"key dim = query dim", s.dim, k.extent(3)}});
  views.at_least("topk", 1, options.topk);
  check_scale(views, options.scale);
  views.option("w", options.w, {{"w batch = query batch", s.batch},
                                {"w length = query length", s.queries},
                                {"w heads = query heads", s.heads}});
  return {.q = q, .k = k, .shape = s, .lengths = {s.queries, s.keys, {}, {}}, .causal = false, .topk = options.topk,
          .scale = scale_or_default(options.scale, s.dim), .activation = options.activation, .w = options.w,
          .indices = {}, .scores = {}};
}
/// The layout of indices, for the checks.
template <class Void>
memory_layout index_layout(const any_index_view<Void>& x) {
  return x.typed([](const auto& view) { return memory_layout(view); });
}
/// A view with an entry for every chosen pair.
inline void check_chosen(const validator& check, const attention_shape& s, idx_t topk, const memory_layout& x,
                         const char* name) {
  const idx_t wanted[] = {s.batch, 1, s.queries, topk};
  if (!std::equal(wanted, wanted + 4, x.extents))
    check.fail({name, " of shape [batch, 1, query length, topk] = ", error_text::list(wanted, 4)},
               error_text::list(x.extents, 4));
}

template <class S, class Options>
indexer_call<S> indexer_call_of(call_views& views, const tensor_view<const S>& q, const tensor_view<const S>& k,
                                const index_output& indices, const Options& options) {
  indexer_call<S> call = indexer_inputs<S>(views, q, k, options);
  const auto write = [&](const char* name, const memory_layout& x) {
    views.write(name, x);
    check_chosen(views, call.shape, options.topk, x, name);
  };
  write("indices", index_layout(indices));
  if (options.scores) write("scores", options.scores);
  if (call.shape.keys >= candidate<compute_type<S>>::most_keys) views.fail("fewer than 2^32 keys", call.shape.keys);
  call.indices = indices, call.scores = options.scores;
  return call;
}

template <class S>
struct indexer_driver {
  using T = compute_type<S>;
  static constexpr idx_t pack_step = 512;

  const indexer_call<S>& in;
  execution& exec;
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
        exec.limit_threads({.operations = 2 * pairs * static_cast<double>(shape.heads * (shape.dim + 2))});
    for_each_wave(
        exec, shape.batch, wave_size(exec, shape.batch, shape.keys * shape.dim * static_cast<idx_t>(sizeof(T))),
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
            const scratch s = exec.scratch(worker, [&](arena& memory) { return layout(memory); });
            const idx_t i = (tiles - 1 - step) * tile_rows, end = (std::min)(i + tile_rows, in.lengths.queries(b));
            if (i < end) choose(b, i, end - i, keys, s);
            in.clear_padding(b, i, i + tile_rows);
          });
        });
  }
};

}  // namespace detail
}}  // namespace attn::ATTN_ISA
