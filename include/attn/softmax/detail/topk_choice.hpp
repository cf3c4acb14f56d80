// attn: which blocks of keys the queries of topk_blocks choose.
//
//   1. block_sums      the sums of the keys of every block, packed as keys are
//   2. block_chooser   a tile of queries times the sums; of each row the blocks with the largest products
//
// Blocks have equal numbers of keys, so their sums rank as their means do.
#pragma once

#include <attn/core/detail/attention_shape.hpp>
#include <attn/softmax/detail/blockwise.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The blocks of a call.
struct topk_shape {
  idx_t block = 1;   // keys of a block; a size beyond the length means the same as the length
  idx_t blocks = 0;  // blocks that may be chosen: all but the last
  idx_t rounds = 0;  // blocks a query chooses beside its own, at most

  topk_shape() = default;
  topk_shape(idx_t keys, idx_t block_size, idx_t topk)
      : block(std::clamp<idx_t>(block_size, 1, std::max<idx_t>(1, keys))),
        blocks(std::max<idx_t>(0, ceil_div(keys, block) - 1)), rounds((std::min)(topk - 1, blocks)) {}

  /// Whether so many queries at the end of the keys read the blocks that they choose in place: up to queries_in_place
  /// of them, and those that choose fewer than twice the blocks there are. (Float, 16384 keys, groups of 4, topk 4: 32
  /// queries take 0.8 of the time.)
  bool streams(idx_t queries) const { return queries <= queries_in_place || queries * (rounds + 1) < 2 * (blocks + 1); }
  /// The block of a position; negative before the first key.
  idx_t block_of(idx_t position) const { return floor_div(position, block); }
  /// How many blocks the query at a position chooses.
  idx_t choices(idx_t position) const { return std::clamp<idx_t>(block_of(position), 0, rounds); }
};

/// The sums of the keys of blocks, as the columns of panels [dim][panel_width]. Number is const T where they are only
/// read.
template <class Number>
struct block_sums {
  using T = std::remove_const_t<Number>;
  static constexpr const char* name = "sums of blocks";

  Number* data = nullptr;
  idx_t dim = 0;

  static idx_t size(idx_t blocks, idx_t dim) { return round_up(blocks, panel_width<T>) * dim; }

  Number* column(idx_t block) const {
    const idx_t lane = block % panel_width<T>;
    return data + (block - lane) * dim + lane;
  }
  void clear(idx_t block) const {
    for (idx_t d = 0; d < dim; ++d) column(block)[d * panel_width<T>] = T(0);
  }
  /// Adds a key to the sum of a block. Keys are added one after the other here and in fill(), so that a cache has the
  /// same sums.
  template <class S>
  void add_key(idx_t block, const S* key, idx_t stride) const {
    Number* const sum = column(block);
    for (idx_t d = 0; d < dim; ++d) sum[d * panel_width<T>] += static_cast<T>(key[d * stride]);
  }
  /// The sums of blocks [begin, end), which are of one panel, from all of their keys; those up to `past` are 0.
  template <class S>
  void fill(const matrix_view<const S>& keys, idx_t block, idx_t begin, idx_t end, idx_t past) const {
    for (idx_t n = end; n < past; ++n) clear(n);
    for (idx_t d = 0; d < dim; d += width<T>)
      for (idx_t n = begin; n < end; ++n) {
        packet<T> sum = zero<T>();
        for (idx_t j = n * block; j < (n + 1) * block; ++j)
          sum = add(sum, load_part<T>(keys.row(j) + d * keys.col_stride, keys.col_stride, dim - d));
        alignas(64) T lanes[width<T>];
        store<T>(lanes, sum);
        for (idx_t c = d; c < std::min<idx_t>(d + width<T>, dim); ++c) column(n)[c * panel_width<T>] = lanes[c - d];
      }
  }
};

/// Chooses the blocks of a tile of queries.
template <class T>
struct block_chooser {
  T *queries, *products;  // a tile in chunks, [tile_rows][score_stride]
  T* best;                // [tile_rows][rounds], descending
  idx_t* chosen;          // [tile_rows][rounds]: their blocks
  idx_t rounds;

  static block_chooser layout(arena& memory, idx_t dim, idx_t rounds) {
    return {.queries = memory.allocate<T>(tile_rows * row_chunk_operands<T>(dim)),
            .products = memory.allocate<T>(tile_rows * score_stride), .best = memory.allocate<T>(tile_rows * rounds),
            .chosen = memory.allocate<idx_t>(tile_rows * rounds), .rounds = rounds};
  }

  /// For rows [first, first + count) of q, the first at `position`: their blocks, ascending, in chosen[row][r],
  /// r < blocks.choices(its position).
  template <class S>
  void choose(const matrix_view<const S>& q, idx_t first, idx_t count, idx_t position, const topk_shape& blocks,
              const block_sums<const T>& sums) const {
    const idx_t most = blocks.block_of(position + count - 1);  // blocks before the last row's own
    if (most <= rounds) {
      for (idx_t m = 0; m < count; ++m)
        for (idx_t r = 0; r < blocks.choices(position + m); ++r) chosen[m * rounds + r] = r;
      return;
    }
    pack_row_chunks<T>([&](idx_t m) { return q.row(first + m); }, count, sums.dim, q.col_stride, T(1), queries);
    const packed_keys<T> panels{.keys = const_cast<T*>(sums.data), .dim = sums.dim};  // which are only read
    for (idx_t from = 0; from < most; from += key_block) {
      const idx_t some = (std::min)(key_block, most - from);
      tile_scores(queries, count, panels, from, round_up(some, width<T>), products);
      for (idx_t m = 0; m < count; ++m)
        take(m, from, (std::min)(from + some, blocks.block_of(position + m)), products + m * score_stride);
    }
    for (idx_t m = 0; m < count; ++m)
      std::sort(chosen + m * rounds, chosen + m * rounds + blocks.choices(position + m));
  }

 private:
  /// Merges blocks [begin, end), whose products these are, into the list of row m. NaN counts as -infinity; of equal
  /// products the earlier block comes first.
  void take(idx_t m, idx_t begin, idx_t end, const T* product) const {
    constexpr T lowest = -std::numeric_limits<T>::infinity();
    T* const list = best + m * rounds;
    idx_t* const which = chosen + m * rounds;
    idx_t n = begin;
    for (; n < (std::min)(end, rounds); ++n) {
      const T x = product[n - begin];
      insert(list, which, n, x == x ? x : lowest, n);
    }
    for (; n < end; n += width<T>) {  // rarely is one of them better than the last in the list
      const idx_t stop = std::min<idx_t>(n + width<T>, end);
      bool any = false;
      for (idx_t j = n; j < stop; ++j) any |= product[j - begin] > list[rounds - 1];
      if (!any) continue;
      for (idx_t j = n; j < stop; ++j)
        if (product[j - begin] > list[rounds - 1]) insert(list, which, rounds - 1, product[j - begin], j);
    }
  }
  /// Inserts block n into a list, dropping the entry at `last`.
  static void insert(T* list, idx_t* which, idx_t last, T x, idx_t n) {
    for (; last > 0 && list[last - 1] < x; --last) {
      list[last] = list[last - 1];
      which[last] = which[last - 1];
    }
    list[last] = x;
    which[last] = n;
  }
};

}}}  // namespace attn::ATTN_ISA::detail
