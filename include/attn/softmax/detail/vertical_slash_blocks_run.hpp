// attn: the driver of vertical_slash_blocks.
//   1. the last queries attend all keys; their weights are added up by columns and by diagonals
//   2. sums of columns by blocks, and of diagonals by how many blocks apart they are
//   3. each block of queries names its best
#pragma once

#include <attn/core/detail/waves.hpp>
#include <attn/softmax/detail/block_list_call.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <class S>
struct vertical_slash_driver {
  using T = compute_type<S>;
  using maker = block_list_maker<S>;
  static constexpr idx_t pack_step = 512;  // keys

  const indexer_call<S>& in;
  idx_t last;  // queries that attend
  const attention_shape& shape = in.shape;
  idx_t together = std::clamp<idx_t>(4096 / in.block, 1, 64);   // blocks of queries of a task
  idx_t distances = in.names() + ceil_div(last, in.block) + 2;  // in blocks, that diagonals have

  struct sums {
    packed_keys<T> keys;
    T *vertical, *slash;  // [keys], [keys + last]: the first diagonal is that of nearest()
    T *of_block, *by_distance;  // [names], [distances]
  };
  sums layout_sums(arena& memory) const {
    return {.keys = packed_keys<T>::layout(memory, shape.keys, shape.dim, 0),
            .vertical = memory.allocate<T>(shape.keys), .slash = memory.allocate<T>(shape.keys + last),
            .of_block = memory.allocate<T>(in.names()), .by_distance = memory.allocate<T>(distances)};
  }
  struct scratch {
    T *queries, *scores;  // [dim][tile_rows], [tile_rows][keys, padded]
  };
  idx_t row_stride = round_up(shape.keys, panel_width<T>) + panel_width<T>;  // no power of two
  scratch layout(arena& memory) const {
    return {memory.allocate<T>(tile_rows * shape.dim), memory.allocate<T>(tile_rows * row_stride)};
  }

  idx_t first_query(idx_t b) const { return std::max<idx_t>(0, in.lengths.queries(b) - last); }
  /// The distance of the first diagonal: of the first query that attends and the last key.
  idx_t nearest(idx_t b) const { return in.position(b, first_query(b)) - (in.lengths.keys(b) - 1); }

  void estimate(idx_t b, idx_t list, const sums& to, const scratch& s) const {
    const heads_of_list<S> of(in, list);
    const idx_t queries = in.lengths.queries(b), keys = in.lengths.keys(b), from = nearest(b);
    std::fill_n(to.vertical, shape.keys, T(0)), std::fill_n(to.slash, shape.keys + last, T(0));
    for (idx_t h = of.first; h < of.first + of.count; ++h) {
      const auto q = head_of(in.q, b, h);
      for (idx_t i = first_query(b); i < queries; i += tile_rows) {
        const idx_t count = std::min<idx_t>(tile_rows, queries - i), end = in.end_of(b, i + count - 1);
        pack_rows<T>([&](idx_t m) { return q.row(i + m); }, count, shape.dim, q.col_stride, in.scale, s.queries);
        for (idx_t n = 0; n < end; n += panel_width<T>)
          panel_scores(s.queries, count, to.keys, n, s.scores, row_stride);
        for (idx_t m = 0; m < count; ++m) {
          const idx_t seen = in.end_of(b, i + m);
          T* const row = s.scores + m * row_stride;
          if (seen == 0) continue;
          weigh_row(row, seen);
          T all = 0;
          for (idx_t j = 0; j < seen; j += pack_step) {
            T part = 0;
            for (idx_t n = j; n < (std::min)(j + pack_step, seen); ++n) part += row[n];
            all += part;
          }
          if (!(all > T(0))) continue;
          const T factor = 1 / all;
          T* const slash = to.slash + (in.position(b, i + m) - from);
          for (idx_t j = 0; j < seen; ++j) to.vertical[j] += row[j] * factor;
          for (idx_t j = 0; j < seen; ++j) slash[-j] += row[j] * factor;
        }
      }
    }
    // A diagonal `apart` tokens from where two blocks begin is found by as many queries fewer of the one in the other.
    for (idx_t c = 0; c < in.names(); ++c) {
      T sum = 0;
      for (idx_t j = c * in.block; j < (std::min)((c + 1) * in.block, keys); ++j) sum += to.vertical[j];
      to.of_block[c] = sum;
    }
    const idx_t diagonals = keys + (queries - first_query(b)) - 1;
    for (idx_t x = 0; x < distances; ++x) {
      const idx_t apart = (first_block(b) + x) * in.block;
      T sum = 0;
      for (idx_t n = (std::max)(apart - in.block + 1 - from, idx_t(0));
           n < (std::min)(apart + in.block - from, diagonals); ++n)
        sum += to.slash[n] * (static_cast<T>(in.block - std::abs(n + from - apart)) / static_cast<T>(in.block));
      to.by_distance[x] = sum;
    }
  }
  /// Blocks that any diagonal is apart, at least: by_distance[x] is of first_block() + x.
  idx_t first_block(idx_t b) const { return std::max<idx_t>(0, floor_div(nearest(b), in.block)); }

  void run() const {
    const double pairs = static_cast<double>(shape.batch * in.q.extent(1)) * static_cast<double>(shape.keys) *
                         static_cast<double>((std::min)(last, shape.queries));
    const auto limit = in.exec.limit_threads({.operations = 2 * pairs * static_cast<double>(shape.dim + 8)});
    const idx_t items = shape.batch * shape.heads, blocks = maker::most_blocks(in);
    const auto layout_item = [&](arena& memory) { return layout_sums(memory); };
    for (const auto& some : waves_of(in.exec, items, layout_item)) {
      some.for_each(ceil_div(shape.keys, pack_step), [&](idx_t item, sums& to, idx_t step, int) {
        const idx_t b = item / shape.heads, list = item % shape.heads;
        const auto k = head_of(in.k, b, heads_of_list<S>(in, list).key_head);
        const idx_t begin = step * pack_step, end = (std::min)(begin + pack_step, in.lengths.keys(b));
        if (begin < end) to.keys.pack_keys([&](idx_t n) { return k.row(begin + n); }, k.col_stride, begin, end);
      });
      some.for_each(1, [&](idx_t item, const sums& to, idx_t, int worker) {
        const scratch s = in.exec.scratch(worker, [&](arena& memory) { return layout(memory); });
        estimate(item / shape.heads, item % shape.heads, to, s);
      });
      some.for_each(ceil_div(blocks, together), [&](idx_t item, const sums& to, idx_t step, int worker) {
        struct lists {
          maker make;
          T* scores;  // [names]
        };
        const lists s = in.exec.scratch(worker, [&](arena& memory) {
          return lists{maker::layout(memory, in), memory.allocate<T>(in.names())};
        });
        const idx_t b = item / shape.heads, list = item % shape.heads;
        const auto [first, count] = maker::blocks_of(in, b);
        for (idx_t n = step * together; n < (std::min)((step + 1) * together, count); ++n) {
          for (idx_t c = 0; c < in.names(); ++c) {
            const idx_t x = first + n - c - first_block(b);
            s.scores[c] = to.of_block[c] + (x >= 0 && x < distances ? to.by_distance[x] : T(0));
          }
          s.make.store(b, list, first + n, s.scores, T(1));
        }
        if (step == 0 && list == 0) in.clear_padding(b, 0, shape.queries);
      });
    }
  }
};

template <class S>
void run_vertical_slash_blocks(const indexer_call<S>& call, idx_t last) {
  vertical_slash_driver<S>{call, last}.run();
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN(S) void run_vertical_slash_blocks(const indexer_call<S>&, idx_t)
#include <attn/core/detail/compiled.hpp>
