// attn: the driver of min_max_blocks, over keys or over the bounds that a cache has: queries, in two parts, times the
// bounds of all blocks, which are packed as keys of twice the dim; of each row the best names (named_blocks.hpp).
#pragma once

#include <attn/core/detail/waves.hpp>
#include <attn/softmax/detail/block_list_call.hpp>
#include <attn/softmax/detail/summarised_tokens.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The largest and the smallest number of the keys of blocks, channel by channel, as the columns of panels
/// [2 dim][panel_width]. NaN is passed over.
template <class Number>
struct block_bounds {
  using T = std::remove_const_t<Number>;
  static constexpr const char* name = "bounds of blocks";
  static constexpr T infinity = std::numeric_limits<T>::infinity();

  Number* data = nullptr;
  idx_t dim = 0;

  static idx_t size(idx_t blocks, idx_t dim) { return 2 * round_up(blocks, panel_width<T>) * dim; }

  Number* column(idx_t block) const {
    const idx_t lane = block % panel_width<T>;
    return data + 2 * (block - lane) * dim + lane;
  }
  void clear(idx_t block) const { fill_column(block, -infinity, infinity); }
  template <class S>
  void add_key(idx_t block, const S* key, idx_t stride) const {
    Number* const high = column(block);
    Number* const low = high + dim * panel_width<T>;
    for (idx_t d = 0; d < dim; ++d) {
      const T x = static_cast<T>(key[d * stride]);
      T &most = high[d * panel_width<T>], &least = low[d * panel_width<T>];
      most = most < x ? x : most, least = x < least ? x : least;
    }
  }
  /// The bounds of block n, from keys [n block, end); zeros where there are none.
  template <class S>
  void fill(const matrix_view<const S>& keys, idx_t block, idx_t n, idx_t end) const {
    if (n * block >= end) return fill_column(n, T(0), T(0));
    for (idx_t d = 0; d < dim; d += width<T>) {
      packet<T> high = broadcast<T>(-infinity), low = broadcast<T>(infinity);
      for (idx_t j = n * block; j < (std::min)((n + 1) * block, end); ++j) {
        const packet<T> x = load_part<T>(keys.row(j) + d * keys.col_stride, keys.col_stride, dim - d);
        high = if_less(high, x, x, high), low = if_less(x, low, x, low);
      }
      alignas(64) T highs[width<T>], lows[width<T>];
      store<T>(highs, high), store<T>(lows, low);
      Number* const to = column(n);
      for (idx_t c = d; c < std::min<idx_t>(d + width<T>, dim); ++c)
        to[c * panel_width<T>] = highs[c - d], to[(dim + c) * panel_width<T>] = lows[c - d];
    }
  }

 private:
  void fill_column(idx_t block, T high, T low) const {
    for (idx_t d = 0; d < 2 * dim; ++d) column(block)[d * panel_width<T>] = d < dim ? high : low;
  }
};

/// Bounds of a cache: those of the first key head of item 0, and how far those of the next key head are behind.
template <class T>
struct cached_bounds {
  const T* data = nullptr;
  idx_t stride = 0;
};

template <class S>
struct min_max_driver {
  using T = compute_type<S>;
  static constexpr idx_t few_names = 32;  // that are sorted out together, at least

  const indexer_call<S>& in;
  cached_bounds<T> cached;  // none in a call over keys
  const attention_shape& shape = in.shape;
  idx_t depth = 2 * shape.dim, lists = shape.kv_heads > 0 ? shape.heads / shape.kv_heads : 0;  // of a key head

  struct scratch {
    T *gathered, *queries, *scores, *sums;  // [tile_rows][depth], in chunks, [tile_rows][score_stride] twice
    scored_keys<T> named;                   // [topk]
    std::span<named_blocks<T>> names;       // [tile_rows]
  };
  scratch layout(arena& memory) const {
    return {.gathered = memory.allocate<T>(tile_rows * depth),
            .queries = memory.allocate<T>(row_chunk_operands<T>(depth) * tile_rows),
            .scores = memory.allocate<T>(tile_rows * score_stride),
            .sums = memory.allocate<T>(tile_rows * score_stride),
            .named = scored_keys<T>::layout(memory, in.topk), .names = layout_lists<T>(memory, in, tile_rows)};
  }

  /// max(q, 0) and min(q, 0), beside one another.
  void gather(const matrix_view<const S>& q, idx_t i, T* to) const {
    const S* const row = q.row(i);
    idx_t d = 0;
    for (; q.col_stride == 1 && d + width<T> <= shape.dim; d += width<T>) {
      const packet<T> x = load_as<T>(row + d);
      store<T>(to + d, if_less(zero<T>(), x, x, zero<T>()));
      store<T>(to + shape.dim + d, if_less(x, zero<T>(), x, zero<T>()));
    }
    for (; d < shape.dim; ++d) {
      const T x = static_cast<T>(row[d * q.col_stride]);
      to[d] = x > T(0) ? x : T(0), to[shape.dim + d] = x < T(0) ? x : T(0);
    }
  }
  /// Rows [row, row + count) of a key head; row r is list r % lists of query r / lists.
  void choose(idx_t b, idx_t key_head, idx_t row, idx_t count, const packed_keys<T>& bounds, const scratch& s) const {
    const auto query = [&](idx_t m) { return (row + m) / lists; };
    const auto list = [&](idx_t m) { return key_head * lists + (row + m) % lists; };
    const auto names = [&](idx_t m) -> named_blocks<T>& { return s.names[static_cast<std::size_t>(m)]; };
    const auto seen = [&](idx_t m) { return ceil_div(in.end_of(b, query(m)), in.block); };
    const idx_t heads = heads_of_list<S>(in, 0).count;
    for (idx_t m = 0; m < count; ++m) {
      names(m).block = 1;  // scores are those of names
      names(m).best.capacity = (std::min)(names(m).best.capacity, std::max<idx_t>(4 * in.topk, few_names));
      names(m).begin(in.forced_of(b, query(m)), in.topk);
    }
    for (idx_t from = 0, end = seen(count - 1); from < end; from += key_block) {
      const idx_t some = (std::min)(key_block, end - from), wide = round_up(some, width<T>);
      for (idx_t h = 0; h < heads; ++h) {
        if (heads > 1 || from == 0) {
          for (idx_t m = 0; m < count; ++m)
            gather(head_of(in.q, b, list(m) * heads + h), query(m), s.gathered + m * depth);
          pack_row_chunks<T>([&](idx_t m) { return s.gathered + m * depth; }, count, depth, 1, T(1), s.queries);
        }
        T* const to = h == 0 ? s.sums : s.scores;
        tile_scores(s.queries, count, bounds, from, wide, to);
        for (idx_t m = 0; h > 0 && m < count; ++m)
          for (idx_t n = m * score_stride; n < m * score_stride + wide; n += width<T>)
            store<T>(s.sums + n, add(load<T>(s.sums + n), load<T>(s.scores + n)));
      }
      for (idx_t m = 0; m < count; ++m)
        if (const idx_t below = seen(m); below > from)
          names(m).take(s.sums + m * score_stride, from, (std::min)(some, below - from), below);
    }
    for (idx_t m = 0; m < count; ++m) in.store(b, list(m), query(m), names(m).finish(s.named));
  }

  void run() const {
    const idx_t blocks = in.names(), tables = round_up(blocks, panel_width<T>), items = shape.batch * shape.kv_heads;
    const double pairs = static_cast<double>(shape.batch * shape.queries) * static_cast<double>(blocks);
    const auto limit = in.exec.limit_threads(
        {.operations = 2 * pairs * static_cast<double>(in.q.extent(1) * (depth + 2)) +
                       (cached.data ? 0 : static_cast<double>(items * shape.keys) * static_cast<double>(depth)),
         .bytes = static_cast<double>(items * blocks) * static_cast<double>(depth * static_cast<idx_t>(sizeof(T)))});
    const auto layout_item = [&](arena& memory) {
      return packed_keys<T>::layout(memory, cached.data ? 0 : blocks, depth, 0);
    };
    const idx_t bytes = tables * depth * static_cast<idx_t>(sizeof(T));
    for (const auto& some :
         waves_of(in.exec, items, cached.data ? items : wave_size(in.exec, items, bytes), layout_item)) {
      if (!cached.data)
        some.for_each(tables / panel_width<T>, [&](idx_t item, const packed_keys<T>& bounds, idx_t panel, int) {
          const idx_t b = item / shape.kv_heads;
          const block_bounds<T> to{bounds.keys, shape.dim};
          for (idx_t n = panel * panel_width<T>; n < (panel + 1) * panel_width<T>; ++n)
            to.fill(head_of(in.k, b, item % shape.kv_heads), in.block, n, in.lengths.keys(b));
        });
      // The last queries of a causal call see most keys: they go first.
      const idx_t tiles = ceil_div(shape.queries * lists, tile_rows);
      some.for_each(tiles, [&](idx_t item, packed_keys<T>& bounds, idx_t step, int worker) {
        const scratch s = in.exec.scratch(worker, [&](arena& memory) { return layout(memory); });
        packed_keys<T> of = bounds;
        if (cached.data) of.keys = const_cast<T*>(cached.data + item * cached.stride);  // which are only read
        const idx_t b = item / shape.kv_heads, row = (tiles - 1 - step) * tile_rows;
        const idx_t end = (std::min)(row + tile_rows, in.lengths.queries(b) * lists);
        if (row < end) choose(b, item % shape.kv_heads, row, end - row, of, s);
        if (step == 0 && item % shape.kv_heads == 0) in.clear_padding(b, 0, shape.queries);
      });
    }
  }
};

template <class S>
void run_min_max_blocks(const indexer_call<S>& call, const cached_bounds<compute_type<S>>& cached) {
  min_max_driver<S>{call, cached}.run();
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN(S) void run_min_max_blocks(const indexer_call<S>&, const cached_bounds<compute_type<S>>&)
#include <attn/core/detail/compiled.hpp>
