// attn: the backward pass of position queries (position_queries.hpp): what they add to the gradients of keys, and their
// own. Both are products of tiles with the gradients of the scores of a block of rows, which they read along diagonals:
// of a key, the rows that see it are at adjacent distances; of a distance, the keys and the rows go together.
#pragma once

#include <attn/core/detail/compensated.hpp>
#include <attn/softmax/detail/backward_memory.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// What the backward pass of a block of rows adds to.
template <class T>
struct position_query_sums {
  T *d_keys = nullptr, *errors = nullptr;  // [slots][sums_stride], and what these sums lost; null: not wanted
  T* d_table = nullptr;                    // [slots of distances][sums_stride], the task's own; null: not wanted
  T* part = nullptr;                       // [tile_rows][sums_stride]
};

/// Of `rows` rows and the keys at slots base + n, n < columns: d [rows][score_stride], the gradients of their products,
/// between tile_rows rows of zeros before and after them, and what these pairs are.
template <class T>
struct position_block {
  const T* d;
  idx_t rows, base, columns;
  const index_map& which;
  idx_t shift, head;
};

/// Pair by pair, without those whose gradient is 0.
template <class T, class P>
void add_positions_one_by_one(const position_queries<T>& queries, const position_block<T>& block,
                              const packed_keys<P>& keys, const position_query_sums<T>& to) {
  const auto& of = queries.head(block.head);
  const idx_t size = sums_stride<T>(keys.dim), stride = queries.table.stride(2);
  for (idx_t m = 0; m < block.rows; ++m)
    for (idx_t n = 0; n < block.columns; ++n) {
      const T x = block.d[m * score_stride + n];
      if (x == T(0)) continue;
      const idx_t slot = block.base + n, distance = keys.positions[slot] - block.which[m] - block.shift;
      const T* const r = queries.row_of_table(block.head, distance);
      T* const key = to.d_keys ? to.d_keys + slot * size : nullptr;
      T* const sum = to.d_table ? to.d_table + of.slot(distance / of.step) * size : nullptr;
      for (idx_t c = 0; key && c < keys.dim; ++c) key[c] += x * r[c * stride];
      for (idx_t c = 0; sum && c < keys.dim; ++c) sum[c] += x * number_of_key(keys, slot, c);
    }
}

/// By tiles; key_rows: the keys of the block as values, in panels `next` numbers apart.
template <class T, class P>
void add_positions(const position_queries<T>& queries, const position_block<T>& block, const packed_keys<P>& keys,
                   const T* key_rows, idx_t next, const position_query_sums<T>& to) {
  constexpr idx_t wide = panel_width<T>;
  const auto* const of = queries.in_a_row(block.head, block.which, keys.positions);
  const idx_t rows = block.rows, columns = block.columns, base = block.base, size = sums_stride<T>(keys.dim);
  const idx_t first = of ? (keys.positions[base] - block.which[0] - block.shift) / of->step - (rows - 1) : 0;
  if (!of || !keys.all_finite(base, base + columns) ||
      !of->rows.all_finite(of->slot(first), of->slot(first + rows + columns + tile_rows) + 1))
    return add_positions_one_by_one(queries, block, keys, to);
  const auto adds_to = [size](T* sums, idx_t count) {  // the first `count` rows of a product
    return [=](auto m, idx_t col, const auto& x) {
      if (m >= count) return;
      T* const sum = sums + m * size + col;
      store<T>(sum, add(load<T>(sum), x));
    };
  };
  for (idx_t n = 0; to.d_keys && n < columns; n += tile_rows) {
    const idx_t some = std::min<idx_t>(tile_rows, columns - n);
    T* const all = to.d_keys + (base + n) * size;
    T* const sums = to.errors ? to.part : all;
    if (to.errors) std::fill_n(sums, tile_rows * size, T(0));
    with_tile_height(some, [&](auto M) {  // key n + m with the distance first + n + k: row m + rows - 1 - k
      const left_operand<T, score_stride + 1, -score_stride> left{block.d + (rows - 1) * score_stride + n};
      panel_products<T, M.value>(left, of->rows.value_panel(0, of->slot(first + n, max_rows + tile_rows)),
                                 of->rows.capacity * wide, 0, keys.dim, rows + M.value - 1, adds_to(sums, some));
    });
    if (to.errors) move_compensated(sums, some * size, T(1), all, to.errors + (base + n) * size);
  }
  for (idx_t e = 0, end = rows + columns - 1; to.d_table && e < end; e += tile_rows) {
    const idx_t some = std::min<idx_t>(tile_rows, end - e), n = std::max<idx_t>(0, e - rows + 1);
    T* const sums = to.d_table + of->slot(first + e, tile_rows) * size;
    with_tile_height(some, [&](auto M) {  // distance first + e + m with key n + k: row n + k + rows - 1 - e - m
      const left_operand<T, -score_stride, score_stride + 1> left{block.d + (n + rows - 1 - e) * score_stride + n};
      panel_products<T, M.value>(left, key_rows + n * wide, next, 0, keys.dim, (std::min)(e + M.value, columns) - n,
                                 adds_to(sums, some));
    });
  }
}

/// What position queries add to the gradients of the `columns` keys from slot `base` on, and their own gradient, from
/// dS of `count` rows.
template <class P, class Score>
[[gnu::noinline]] void add_position_gradients(idx_t count, idx_t base, idx_t columns, const index_map& positions,
                                              const backward_keys<P>& k, const score_terms<sum_type<P>, Score>& terms,
                                              const backward_scratch<P>& s, sum_type<P>* d_table) {
  using T = sum_type<P>;
  constexpr idx_t wide = panel_width<T>;
  T* const d = s.position_d;
  const T* key_rows = nullptr;
  idx_t next = 0;  // panel
  if constexpr (numbers_of<P> == 1) {
    key_rows = k.keys.value_panel(0, base), next = k.keys.capacity * wide;
  } else {
    const auto numbers_of_rows = [](const P* pairs, T* to, idx_t stride) {
      packet<T> first, second;
      load_numbers(pairs, 0, first, second);
      store<T>(to, first), store<T>(to + stride, second);
    };
    for (idx_t r = 0; r < count; r += 2)
      for (idx_t n = 0; n < columns; n += width<T>)
        numbers_of_rows(s.d_scores + r / 2 * score_stride + n, d + r * score_stride + n, score_stride);
    const idx_t begin = base / 2 * 2;
    key_rows = s.key_rows + (base - begin) * wide, next = s.key_row_count * wide;
    for (idx_t c = 0; d_table && c < k.keys.dim; c += width<T>)
      for (idx_t slot = begin; slot < base + columns; slot += 2)
        numbers_of_rows(k.keys.value_panel(c / wide * wide, slot) + c % wide,
                        s.key_rows + c / wide * next + (slot - begin) * wide + c % wide, wide);
  }
  for (T* zeros : {d - tile_rows * score_stride, d + count * score_stride})
    for (idx_t m = 0; m < tile_rows; ++m) std::fill_n(zeros + m * score_stride, columns, T(0));
  const position_block<T> block{d, count, base, columns, positions, terms.query_shift, terms.head};
  add_positions(terms.by_position, block, k.keys, key_rows, next, {k.d_keys, k.key_errors, d_table, s.part});
}

}}}  // namespace attn::ATTN_ISA::detail
