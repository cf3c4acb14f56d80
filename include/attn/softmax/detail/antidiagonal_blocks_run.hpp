// attn: the driver of antidiagonal_blocks.
//   1. stride keys become one row [stride dim], packed; stride queries, in reverse order, one row of a tile, so that
//      one product adds up an antidiagonal
//   2. for some blocks of queries: the products with all keys they see, softmax per row, added up by blocks of keys
//   3. each block of queries names its best
#pragma once

#include <attn/core/detail/waves.hpp>
#include <attn/softmax/detail/block_list_call.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <class S>
struct antidiagonal_driver {
  using T = compute_type<S>;
  using maker = block_list_maker<S>;
  static constexpr idx_t pack_step = 16 * panel_width<T>;  // rows of keys
  static constexpr idx_t rows = 24;                        // of queries that share a reading of the keys

  const indexer_call<S>& in;
  idx_t stride;
  T threshold;
  const attention_shape& shape = in.shape;
  idx_t depth = stride * shape.dim, key_rows = ceil_div(shape.keys, stride), of_block = in.block / stride;
  /// Blocks of queries that are taken together, so that their rows fill tiles.
  idx_t together = std::max<idx_t>(1, rows / of_block);
  idx_t row_stride = round_up(key_rows, panel_width<T>) + panel_width<T>;  // no power of two

  struct scratch {
    S* gathered;  // [tile_rows][depth]
    T* queries;   // per tile [depth][tile_rows]
    T* scores;    // [rows][row_stride]
    T* sums;      // [together][names]
    maker lists;
  };
  scratch layout(arena& memory) const {
    return {.gathered = memory.allocate<S>(tile_rows * depth),
            .queries = memory.allocate<T>(round_up(rows, tile_rows) * depth),
            .scores = memory.allocate<T>(round_up(rows, tile_rows) * row_stride),
            .sums = memory.allocate<T>(together * in.names()),
            .lists = maker::layout(memory, in)};
  }

  /// Rows first ... first + stride - 1 of x, in one row; zeros for those outside [0, count).
  void gather(const matrix_view<const S>& x, idx_t first, idx_t step, idx_t count, S* to) const {
    for (idx_t n = 0; n < stride; ++n, first += step, to += shape.dim) {
      const bool there = first >= 0 && first < count;
      const S* const row = there ? x.row(first) : nullptr;
      for (idx_t d = 0; d < shape.dim; ++d) to[d] = there ? row[d * x.col_stride] : S(0);
    }
  }
  void pack(idx_t item, packed_keys<T>& keys, idx_t step, S* gathered) const {
    const idx_t b = item / shape.kv_heads, count = in.lengths.keys(b);
    const auto k = head_of(in.k, b, item % shape.kv_heads);
    const idx_t end = (std::min)((step + 1) * pack_step, ceil_div(count, stride));
    for (idx_t row = step * pack_step; row < end; row += panel_width<T>) {
      const idx_t some = std::min<idx_t>(panel_width<T>, end - row);
      for (idx_t n = 0; n < some; ++n) gather(k, (row + n) * stride, 1, count, gathered + n * depth);
      keys.pack_keys([&](idx_t n) { return gathered + n * depth; }, 1, row, row + some);
    }
  }

  /// Blocks [block, block + count) of queries.
  void choose(idx_t b, idx_t list, idx_t block, idx_t count, const packed_keys<T>& keys, const scratch& s) const {
    const heads_of_list<S> of(in, list);
    const idx_t queries = in.lengths.queries(b), first = in.position(b, 0);
    const idx_t all_rows = ceil_div(in.lengths.keys(b), stride), first_row = block * of_block, some = count * of_block;
    const auto seen = [&](idx_t row) {
      return in.seen.limit.causal ? std::clamp<idx_t>(row + 1, 0, all_rows) : all_rows;
    };
    std::fill_n(s.sums, count * in.names(), T(0));
    for (idx_t h = of.first; h < of.first + of.count; ++h) {
      const auto q = head_of(in.q, b, h);
      for (idx_t from = 0; from < some; from += rows) {
        const idx_t of_part = (std::min)(rows, some - from), row = first_row + from;
        for (idx_t r = 0; r < of_part; r += tile_rows) {
          const idx_t of_tile = std::min<idx_t>(tile_rows, of_part - r);
          for (idx_t m = 0; m < of_tile; ++m)
            gather(q, (row + r + m + 1) * stride - 1 - first, -1, queries, s.gathered + m * depth);
          pack_rows<T>([&](idx_t m) { return s.gathered + m * depth; }, of_tile, depth, 1,
                       in.scale / static_cast<T>(stride), s.queries + r * depth);
        }
        for (idx_t n = 0, end = seen(row + of_part - 1); n < end; n += panel_width<T>)
          for (idx_t r = 0; r < of_part; r += tile_rows)
            panel_scores(s.queries + r * depth, std::min<idx_t>(tile_rows, of_part - r), keys, n,
                         s.scores + r * row_stride, row_stride);
        for (idx_t r = 0; r < of_part; ++r) {
          // A row whose queries are all outside adds nothing.
          const idx_t last = (row + r + 1) * stride - 1 - first, end = seen(row + r);
          if (last < 0 || last - stride + 1 >= queries || end == 0) continue;
          add_weights(s.scores + r * row_stride, end, s.sums + (from + r) / of_block * in.names());
        }
      }
    }
    for (idx_t n = 0; n < count; ++n) s.lists.store(b, list, block + n, s.sums + n * in.names(), threshold);
  }
  /// Adds the softmax of a row, block of keys by block of keys.
  void add_weights(T* scores, idx_t end, T* sums) const {
    weigh_row(scores, end);
    const auto sum_of = [&](idx_t name) {
      T sum = 0;
      for (idx_t n = name * of_block; n < (std::min)((name + 1) * of_block, end); ++n) sum += scores[n];
      return sum;
    };
    const idx_t names = ceil_div(end, of_block);
    T all = 0;
    for (idx_t name = 0; name < names; ++name)
      all += scores[name] = sum_of(name);  // reads what is not yet written over
    if (all > T(0))
      for (idx_t name = 0; name < names; ++name) sums[name] += scores[name] / all;
  }

  void run() const {
    const double pairs =
        static_cast<double>(shape.queries) * static_cast<double>(shape.keys) / static_cast<double>(stride);
    const auto limit = in.exec.limit_threads(
        {.operations = 2 * pairs * static_cast<double>(shape.batch * in.q.extent(1) * (shape.dim + 2))});
    const idx_t lists = shape.kv_heads > 0 ? shape.heads / shape.kv_heads : 0;
    const idx_t tasks = ceil_div(maker::most_blocks(in), together);
    const auto layout_item = [&](arena& memory) { return packed_keys<T>::layout(memory, key_rows, depth, 0); };
    for (const auto& items : waves_of(in.exec, shape.batch * shape.kv_heads, layout_item)) {
      items.for_each(ceil_div(key_rows, pack_step), [&](idx_t item, packed_keys<T>& keys, idx_t step, int worker) {
        S* const gathered =
            in.exec.scratch(worker, [&](arena& memory) { return memory.allocate<S>(panel_width<T> * depth); });
        pack(item, keys, step, gathered);
      });
      // The last queries of a causal call see most keys: they go first.
      items.for_each(tasks * lists, [&](idx_t item, const packed_keys<T>& keys, idx_t step, int worker) {
        const scratch s = in.exec.scratch(worker, [&](arena& memory) { return layout(memory); });
        const idx_t b = item / shape.kv_heads, list = item % shape.kv_heads * lists + step % lists;
        const auto [block, count] = maker::blocks_of(in, b);
        const idx_t from = (tasks - 1 - step / lists) * together;
        if (from < count) choose(b, list, block + from, (std::min)(together, count - from), keys, s);
        if (step == 0 && item % shape.kv_heads == 0) in.clear_padding(b, 0, shape.queries);
      });
    }
  }
};

template <class S>
void run_antidiagonal_blocks(const indexer_call<S>& call, idx_t stride, compute_type<S> threshold) {
  antidiagonal_driver<S>{call, stride, threshold}.run();
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN(S) void run_antidiagonal_blocks(const indexer_call<S>&, idx_t, compute_type<S>)
#include <attn/core/detail/compiled.hpp>
