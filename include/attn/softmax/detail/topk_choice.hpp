// attn: which blocks of keys the queries of topk_blocks choose, and in which order they are attended.
//
//   1. block_sums      the sums of the keys of every block, packed as keys are
//   2. block_chooser   a tile of queries times the sums; of each row the blocks with the largest products
//   3. topk_head       the queries of round r, those that choose an r-th block, sorted by it
//   4. topk_choice     all of this for all heads of a call, in tasks
//
// Blocks have equal numbers of keys, so their sums rank as their means do. In a round every query occurs once, so
// threads may divide a round in any way. The last round is that of the own blocks, which every query has.
#pragma once

#include <attn/core/detail/attention_shape.hpp>
#include <attn/softmax/detail/blockwise.hpp>

namespace attn::inline ATTN_ISA::detail {

/// The blocks of a call.
struct topk_shape {
  index block = 1;   // keys of a block; a size beyond the length means the same as the length
  index blocks = 0;  // blocks that may be chosen: all but the last
  index rounds = 0;  // blocks a query chooses beside its own, at most

  topk_shape() = default;
  topk_shape(index keys, index block_size, index topk)
      : block(std::clamp<index>(block_size, 1, std::max<index>(1, keys))),
        blocks(std::max<index>(0, ceil_div(keys, block) - 1)), rounds(std::min(topk - 1, blocks)) {}

  /// The block of a position; negative before the first key.
  index block_of(index position) const { return floor_div(position, block); }
  /// How many blocks the query at a position chooses.
  index choices(index position) const { return std::clamp<index>(block_of(position), 0, rounds); }
};

/// The sums of the keys of blocks, as the columns of panels [dim][panel_width]. Number is const T where they are only
/// read.
template <class Number>
struct block_sums {
  using T = std::remove_const_t<Number>;

  Number* data = nullptr;
  index dim = 0;

  static index size(index blocks, index dim) { return round_up(blocks, panel_width<T>) * dim; }

  Number* column(index block) const {
    const index lane = block % panel_width<T>;
    return data + (block - lane) * dim + lane;
  }
  void clear(index block) const {
    for (index d = 0; d < dim; ++d) column(block)[d * panel_width<T>] = T(0);
  }
  /// Adds a key to the sum of a block. Keys are added one after the other here and in fill(), so that a cache has the
  /// same sums.
  template <class S>
  void add_key(index block, const S* key, index stride) const {
    Number* const sum = column(block);
    for (index d = 0; d < dim; ++d) sum[d * panel_width<T>] += static_cast<T>(key[d * stride]);
  }
  /// The sums of blocks [begin, end), which are of one panel, from all of their keys.
  template <class S>
  void fill(const matrix_view<const S>& keys, index block, index begin, index end) const {
    std::fill_n(column(begin), panel_width<T> * dim, T(0));
    for (index d = 0; d < dim; d += width<T>)
      for (index n = begin; n < end; ++n) {
        packet<T> sum = zero<T>();
        for (index j = n * block; j < (n + 1) * block; ++j)
          sum = add(sum, load_part<T>(keys.row(j) + d * keys.col_stride, keys.col_stride, dim - d));
        alignas(64) T lanes[width<T>];
        store<T>(lanes, sum);
        for (index c = d; c < std::min<index>(d + width<T>, dim); ++c) column(n)[c * panel_width<T>] = lanes[c - d];
      }
  }
};

/// Chooses the blocks of a tile of queries.
template <class T>
struct block_chooser {
  T *queries, *products;  // [dim][tile_rows], [tile_rows][score_stride]
  T* best;                // [tile_rows][rounds], descending
  index* chosen;          // [tile_rows][rounds]: their blocks
  index rounds;

  static block_chooser layout(arena& memory, index dim, index rounds) {
    return {.queries = memory.allocate<T>(tile_rows * dim),
            .products = memory.allocate<T>(tile_rows * score_stride),
            .best = memory.allocate<T>(tile_rows * rounds),
            .chosen = memory.allocate<index>(tile_rows * rounds),
            .rounds = rounds};
  }

  /// For rows [first, first + count) of q, the first at `position`: their blocks, ascending, in chosen[row][r],
  /// r < blocks.choices(its position).
  template <class S>
  void choose(const matrix_view<const S>& q, index first, index count, index position, const topk_shape& blocks,
              const block_sums<const T>& sums) const {
    const index most = blocks.block_of(position + count - 1);  // blocks before the last row's own
    if (most <= rounds) {
      for (index m = 0; m < count; ++m)
        for (index r = 0; r < blocks.choices(position + m); ++r) chosen[m * rounds + r] = r;
      return;
    }
    pack_rows<T>([&](index m) { return q.row(first + m); }, count, sums.dim, q.col_stride, T(1), queries);
    const packed_keys<T> panels{.keys = const_cast<T*>(sums.data), .dim = sums.dim};  // which are only read
    for (index from = 0; from < most; from += key_block) {
      const index some = std::min(key_block, most - from);
      with_tile_height(count, [&](auto M) {
        tile_scores<T, M.value>(queries, panels, from, round_up(some, width<T>), products);
      });
      for (index m = 0; m < count; ++m)
        take(m, from, std::min(from + some, blocks.block_of(position + m)), products + m * score_stride);
    }
    for (index m = 0; m < count; ++m)
      std::sort(chosen + m * rounds, chosen + m * rounds + blocks.choices(position + m));
  }

 private:
  /// Merges blocks [begin, end), whose products these are, into the list of row m. NaN counts as -infinity; of equal
  /// products the earlier block comes first.
  void take(index m, index begin, index end, const T* product) const {
    constexpr T lowest = -std::numeric_limits<T>::infinity();
    T* const list = best + m * rounds;
    index* const which = chosen + m * rounds;
    index n = begin;
    for (; n < std::min(end, rounds); ++n) {
      const T x = product[n - begin];
      insert(list, which, n, x == x ? x : lowest, n);
    }
    for (; n < end; n += width<T>) {  // rarely is one of them better than the last in the list
      const index stop = std::min<index>(n + width<T>, end);
      bool any = false;
      for (index j = n; j < stop; ++j) any |= product[j - begin] > list[rounds - 1];
      if (!any) continue;
      for (index j = n; j < stop; ++j)
        if (product[j - begin] > list[rounds - 1]) insert(list, which, rounds - 1, product[j - begin], j);
    }
  }
  /// Inserts block n into a list, dropping the entry at `last`.
  static void insert(T* list, index* which, index last, T x, index n) {
    for (; last > 0 && list[last - 1] < x; --last) {
      list[last] = list[last - 1];
      which[last] = which[last - 1];
    }
    list[last] = x;
    which[last] = n;
  }
};

/// The queries of one head: what they chose, and their order in every round.
struct topk_head {
  index batch = 0, head = 0, queries = 0, shift = 0;  // query i is at position i + shift
  topk_shape blocks;
  index stride = 0;         // queries of the longest batch item
  index *chosen = nullptr;  // [rounds][stride]: the r-th block of query i
  index *order = nullptr;   // [rounds][stride]: queries of round r by their r-th block, then by position

  static index size(index queries, const topk_shape& blocks) { return queries * blocks.rounds; }

  /// The queries of round r are those from this one on. Round number `rounds` is that of the own blocks.
  index first_of(index round) const {
    if (round == blocks.rounds) return 0;
    return std::clamp<index>((round + 1) * blocks.block - shift, 0, queries);
  }
  index count_of(index round) const { return queries - first_of(round); }

  /// Entry n of a round: which query it is, and which block it attends.
  index query(index round, index n) const { return round == blocks.rounds ? n : order[round * stride + n]; }
  index block(index round, index n) const {
    return round == blocks.rounds ? blocks.block_of(n + shift) : chosen[round * stride + query(round, n)];
  }
  /// Entries n, n + 1, ... of a round as rows of q.
  index_map rows(index round, index n) const {
    return round == blocks.rounds ? index_map{n, 1, nullptr} : index_map{0, 1, order + round * stride + n};
  }

  /// The keys of its block that entry n of a round sees.
  key_range seen(index round, index n) const {
    if (round < blocks.rounds) return {0, blocks.block};
    const index position = n + shift;
    return {0, position < 0 ? 0 : position - blocks.block_of(position) * blocks.block + 1};
  }

  /// Sorts a round. next [blocks + 1] is scratch.
  void sort(index round, index* next) const {
    const index first = first_of(round);
    const index* const by = chosen + round * stride;
    std::fill_n(next, blocks.blocks + 1, index(0));
    for (index i = first; i < queries; ++i) ++next[by[i] + 1];
    for (index n = 1; n <= blocks.blocks; ++n) next[n] += next[n - 1];
    for (index i = first; i < queries; ++i) order[round * stride + next[by[i]]++] = i;
  }

  /// visit(block, first entry, entries) for the runs of one block among entries [begin, end) of a round.
  template <class Visit>
  void for_each_run(index round, index begin, index end, const Visit& visit) const {
    for (index n = begin, stop; n < end; n = stop) {
      const index of = block(round, n);
      for (stop = n + 1; stop < end && block(round, stop) == of;) ++stop;
      visit(of, n, stop - n);
    }
  }
};

/// The choice of all heads of a call, forward and backward.
template <class S>
struct topk_choice {
  using T = compute_type<S>;

  const attention_shape& shape;
  const sequence_lengths& lengths;
  const topk_shape& blocks;
  tensor_view<const S> q, k;
  const T* sums = nullptr;  // those of a cache, sums_stride from key head to key head, or null
  index sums_stride = 0;

  /// Memory that the threads share for one key head of one batch item.
  struct head_scratch {
    block_sums<T> sums;
    index *chosen, *order;  // of every query head
  };
  /// For `heads` query heads at a time.
  head_scratch layout(arena& memory, index heads) const {
    return {.sums = {memory.allocate<T>(sums ? 0 : block_sums<T>::size(blocks.blocks, shape.dim)), shape.dim},
            .chosen = memory.allocate<index>(heads * topk_head::size(shape.queries, blocks)),
            .order = memory.allocate<index>(heads * topk_head::size(shape.queries, blocks))};
  }
  struct thread_scratch {
    block_chooser<T> chooser;
    index* next;
  };
  thread_scratch layout_scratch(arena& memory) const {
    return {.chooser = block_chooser<T>::layout(memory, shape.dim, blocks.rounds),
            .next = memory.allocate<index>(blocks.blocks + 1)};
  }

  /// Query head `member` of a key head, whose tables are number `slot`.
  topk_head head(index key_head, index member, const head_scratch& p, index slot) const {
    const index b = key_head / shape.kv_heads, size = topk_head::size(shape.queries, blocks);
    return {.batch = b, .head = key_head % shape.kv_heads * shape.group() + member, .queries = lengths.queries(b),
            .shift = lengths.keys(b) - lengths.queries(b), .blocks = blocks, .stride = shape.queries,
            .chosen = p.chosen + slot * size, .order = p.order + slot * size};
  }
  block_sums<const T> sums_of(index key_head, const head_scratch& p) const {
    return {sums ? sums + key_head * sums_stride : p.sums.data, shape.dim};
  }

  /// for_each(steps, body(key head, head_scratch, step, scratch)) runs tasks: the sums of all blocks.
  template <class ForEach>
  void add_up(const ForEach& for_each) const {
    if (sums || blocks.rounds == 0) return;
    for_each(ceil_div(blocks.blocks, panel_width<T>), [&](index key_head, const head_scratch& p, index step, auto&&) {
      const index b = key_head / shape.kv_heads, begin = step * panel_width<T>,
                  end = std::min({begin + panel_width<T>, blocks.blocks, lengths.keys(b) / blocks.block});
      if (begin < end) p.sums.fill(head_of(k, b, key_head % shape.kv_heads), blocks.block, begin, end);
    });
  }
  /// The choice of query heads [first, first + count) of every key head.
  template <class ForEach>
  void choose(index first, index count, const ForEach& for_each) const {
    if (blocks.rounds == 0) return;
    for_each(count * ceil_div(shape.queries, max_rows),
             [&](index key_head, const head_scratch& p, index step, const thread_scratch& s) {
               const topk_head h = head(key_head, first + step % count, p, step % count);
               const index begin = std::max(step / count * max_rows, h.first_of(0)),
                           end = std::min(step / count * max_rows + max_rows, h.queries);
               for (index i = begin; i < end; i += tile_rows)
                 choose_tile(h, i, std::min<index>(tile_rows, end - i), sums_of(key_head, p), s.chooser);
             });
    for_each(count * blocks.rounds, [&](index key_head, const head_scratch& p, index step, const thread_scratch& s) {
      head(key_head, first + step % count, p, step % count).sort(step / count, s.next);
    });
  }

 private:
  void choose_tile(const topk_head& h, index i, index count, const block_sums<const T>& of,
                   const block_chooser<T>& chooser) const {
    chooser.choose(head_of(q, h.batch, h.head), i, count, i + h.shift, blocks, of);
    for (index m = 0; m < count; ++m)
      for (index r = 0; r < blocks.choices(i + m + h.shift); ++r)
        h.chosen[r * h.stride + i + m] = chooser.chosen[m * blocks.rounds + r];
  }
};

/// Number of rows of a run that are attended at a time, so that these row blocks are about equal.
inline index rows_of_run(index count) { return round_up(ceil_div(count, ceil_div(count, max_rows)), tile_rows); }

}  // namespace attn::inline ATTN_ISA::detail
