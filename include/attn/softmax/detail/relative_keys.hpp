// attn: relative keys: the product of a score is q_i.k_j + q'_i.r[h, clamp(j - p_i, -R, R) + R].
//
// A tile of M rows and n adjacent keys sees n + M - 1 distances: its products with their keys r are one more product of
// the tile, each row of which is added to its scores one place further on than the row before. Backward, the gradients
// of its scores are put side by side by distance in the same way. Where rows or keys are listed, as beside global
// tokens, products are taken one by one.
#pragma once

#include <attn/core/detail/attention_shape.hpp>
#include <attn/core/detail/sums_in_parts.hpp>
#include <attn/softmax/detail/tile_output.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// sum over d < count of x[d] y[d]
template <class T, class X, class Y>
T row_dot(const X* x, idx_t x_stride, const Y* y, idx_t y_stride, idx_t count) {
  packet<T> sum = zero<T>();
  for (idx_t d = 0; d < count; d += width<T>)
    sum = fma(load_part<T>(x + d * x_stride, x_stride, count - d), load_part<T>(y + d * y_stride, y_stride, count - d),
              sum);
  return sum_lanes(sum);
}

/// Rows by distance of a table [H or 1, 2R + 1, D]: row(slot) is that of distance step (slot - middle); those beyond the
/// table are its first and its last.
template <class T>
struct distance_rows {
  tensor_view<const T, 3> table;
  idx_t head, step = 1, middle = 0;

  const T* operator()(idx_t slot) const {
    const idx_t reach = table.extent(1) / 2;
    return &table(table.extent(0) == 1 ? 0 : head, std::clamp(step * (slot - middle), -reach, reach) + reach, 0);
  }
};

/// The keys r of a head packed: slot e + reach is that of distance step e. Backward also as rows, in the place of
/// values.
template <class T>
struct packed_distances {
  static constexpr idx_t margin = 0;

  packed_keys<T> keys{};
  idx_t reach = 0, step = 1;

  idx_t middle() const { return reach; }
  idx_t count() const { return 2 * reach + 1; }
};

/// Which keys r are packed.
struct distance_range {
  idx_t furthest = 0;        // no query and key are further apart
  list_view<idx_t> steps{};  // distances are multiples of it: of one for all heads, or of one per head; 1 unless given
  bool rows_too = false;     // for the backward pass

  idx_t step(idx_t h) const { return step_of_head(steps, h); }
};

/// The table of a term by distance, and what is packed of it; null: none.
template <class T, class Packed>
struct distance_tables {
  tensor_view<const T, 3> table{};  // [H or 1, 2R + 1, D]
  Packed* heads = nullptr;          // one for all, or one per head
  idx_t count = 0;

  explicit operator bool() const { return bool(table); }
  bool packed() const { return heads != nullptr; }
  const Packed& head(idx_t h) const { return heads[count == 1 ? 0 : h]; }
  idx_t reach() const { return table.extent(1) / 2; }
  const T* row_of_table(idx_t h, idx_t distance) const { return distance_rows<T>{table, h}(distance); }

  /// Memory for a range: layout_head(arena, step, reach in steps) for each.
  template <class Layout>
  void layout_heads(arena& memory, const tensor_view<const T, 3>& of, idx_t query_heads, const distance_range& range,
                    const Layout& layout_head) {
    table = of;
    if (!table || query_heads == 0) return;
    bool alike = table.extent(0) == 1;
    for (idx_t h = 1; h < query_heads; ++h) alike &= range.step(h) == range.step(0);
    count = alike ? 1 : query_heads;
    idx_t h = 0;
    heads = memory.allocate_list(count, [&](arena& m) {
      const idx_t step = range.step(h++);
      return layout_head(m, step, (std::min)(ceil_div(reach(), step), range.furthest / step));
    });
  }
  /// The packed head, where rows and keys are in its steps.
  const Packed* in_a_row(idx_t h, const index_map& which, const index_map& keys) const {
    const Packed& of = head(h);
    return !which.list && !keys.list && which.step == of.step && keys.step == of.step ? &of : nullptr;
  }
  /// The slots that an entry of the table has in a packed head.
  key_range slots_of_entry(const Packed& of, idx_t entry) const {
    const idx_t distance = entry - reach();
    if (distance == 0 && reach() == 0) return {0, of.count()};
    if (std::abs(distance) == reach() && of.reach * of.step >= reach())
      return distance < 0 ? key_range{0, of.margin + 1} : key_range{of.count() - 1 - of.margin, of.count()};
    if (distance % of.step != 0 || std::abs(distance / of.step) > of.reach) return {};
    const idx_t slot = distance / of.step + of.middle();
    return {slot, slot + 1};
  }
};

/// Of a block of rows, what the backward pass adds to.
template <class T>
struct relative_key_sums {
  T* d_queries = nullptr;  // [rows][stride], null: not wanted
  idx_t stride = 0;
  T* d_keys = nullptr;     // [slots][sums_stride], the task's own; null: not wanted

  explicit operator bool() const { return d_queries || d_keys; }
};

/// Those of all heads of a call; null: none.
template <class T>
struct relative_keys : distance_tables<T, packed_distances<T>> {
  using base = distance_tables<T, packed_distances<T>>;
  using base::table, base::heads, base::head, base::row_of_table, base::in_a_row;

  /// Memory for the keys of a range.
  static relative_keys layout(arena& memory, const tensor_view<const T, 3>& table, idx_t query_heads,
                              const distance_range& range) {
    relative_keys of;
    of.layout_heads(memory, table, query_heads, range, [&](arena& m, idx_t step, idx_t reach) {
      const idx_t row_numbers = table.extent(2);
      return packed_distances<T>{
          packed_keys<T>::layout(m, 2 * reach + 1, row_numbers, range.rows_too ? row_numbers : 0), reach, step};
    });
    return of;
  }
  void pack(idx_t n) const {
    packed_distances<T>& to = heads[n];
    const distance_rows<T> row{table, n, to.step, to.reach};
    to.keys.pack_keys(row, table.stride(2), 0, to.count());
    if (to.keys.dim_v > 0) to.keys.pack_value_rows(row, table.stride(2), 0, to.count());
  }

  /// s[m][n] += q'_m.r of the scores of a tile: of queries [dim][tile_rows], which are scaled, at positions which[m] +
  /// shift, and the keys at slots t.first + n, n < t.count.
  [[gnu::noinline]] void add_tile(const T* queries, const index_map& which, idx_t shift, idx_t h, const index_map& keys,
                             const tile& t, T* s) const {
    const packed_distances<T>& of = head(h);
    const idx_t dim = of.keys.dim;
    if (!in_a_row(h, which, keys)) {
      for (idx_t m = 0; m < t.rows; ++m)
        add_one_by_one(queries + m, tile_rows, s + m * score_stride + t.low - t.first, t.high - t.low, h,
                       which[m] + shift, keys, t.low);
      return;
    }
    constexpr idx_t wide = panel_width<T>, stride = round_up(key_block + tile_rows, wide) + wide;
    alignas(64) T products[array_size<tile_rows * stride>];
    const idx_t first = (keys[t.first] - which[0] - shift) / of.step;  // distance of row 0 to the first key, in steps
    const key_range tile_slots = slots_of(of, first, t);
    const idx_t low = tile_slots.begin, high = tile_slots.end - 1;
    const idx_t begin = low / wide * wide;
    with_tile_height(t.rows, [&](auto M) {
      for (idx_t slot = begin; slot <= high; slot += wide)
        tile_product<T, M.value, 2>(packed_rows<T>{queries}, of.keys.key_panel(slot), operands<T>(dim),
                                    [&](auto m, auto vector, const auto& x) {
                                      store<T>(products + m * stride + slot - begin + vector * width<T>, x);
                                    });
    });
    for (idx_t m = 0; m < t.rows; ++m) {
      T *const row = s + m * score_stride, *const product = products + m * stride - begin;
      const key_range nearby = within(of, first - m, t.count);
      for (idx_t n = 0; n < nearby.begin; ++n) row[n] += product[0];
      const T* const x = product + first - m + of.reach;
      idx_t n = nearby.begin;
      for (; n + width<T> <= nearby.end; n += width<T>) store<T>(row + n, add(load<T>(row + n), load<T>(x + n)));
      for (; n < nearby.end; ++n) row[n] += x[n];
      for (; n < t.count; ++n) row[n] += product[2 * of.reach];
    }
  }

  /// The same for the row q' of a query at position p, a key at a time.
  [[gnu::noinline]] void add_one_by_one(const T* query, idx_t stride, T* s, idx_t some, idx_t h, idx_t p,
                                        const index_map& keys, idx_t slot) const {
    for (idx_t n = 0; n < some; ++n)
      s[n] += row_dot<T>(query, stride, row_of_table(h, keys[slot + n] - p), table.stride(2), table.extent(2));
  }

  /// The gradients of q' and r from those of the products of a tile, d [tile_rows][score_stride]; q' are the rows from
  /// t.row on of panels [max_rows][panel_width]. `finite`: whether all of q' is.
  [[gnu::noinline]] void add_gradients(const T* d, const T* panels, bool finite, const index_map& which, idx_t shift,
                                       idx_t h, const index_map& keys, const tile& t,
                                       const relative_key_sums<T>& to) const {
    const packed_distances<T>& of = head(h);
    const idx_t dim = of.keys.dim, d_stride = sums_stride<T>(dim);
    T* const d_queries = to.d_queries ? to.d_queries + t.row * to.stride : nullptr;
    const T* const queries = panels + t.row * panel_width<T>;
    if (!in_a_row(h, which, keys)) {
      for (idx_t m = 0; m < t.rows; ++m)
        for (idx_t slot = t.low; slot < t.high; ++slot) {
          const T x = d[m * score_stride + slot - t.first];
          if (x == T(0)) continue;
          const idx_t distance = keys[slot] - which[m] - shift;
          const T* const r = row_of_table(h, distance);
          for (idx_t c = 0; d_queries && c < dim; ++c) d_queries[m * to.stride + c] += x * r[c * table.stride(2)];
          T* const sum = to.d_keys ? to.d_keys + slot_of(of, distance) * d_stride : nullptr;
          for (idx_t c = 0; sum && c < dim; ++c)
            sum[c] += x * queries[c / panel_width<T> * panel_width<T> * max_rows + m * panel_width<T> + c % panel_width<T>];
        }
      return;
    }
    const idx_t first = (keys[t.first] - which[0] - shift) / of.step;
    const key_range tile_slots = slots_of(of, first, t);
    const idx_t low = tile_slots.begin, high = tile_slots.end - 1;
    alignas(64) T by_distance[tile_rows * score_stride];
    for (idx_t m = 0; m < t.rows; ++m) {
      const T* const row = d + m * score_stride;
      T* const sums = by_distance + m * score_stride;
      std::fill_n(sums, std::min<idx_t>(score_stride, high + 1 - low + tile_rows), T(0));
      const key_range nearby = within(of, first - m, t.count);
      for (idx_t n = nearby.begin; n < nearby.end; ++n) sums[first - m + of.reach - low + n] = row[n];
      for (idx_t n = 0; n < nearby.begin; ++n) sums[-low] += row[n];
      for (idx_t n = nearby.end; n < t.count; ++n) sums[2 * of.reach - low] += row[n];
    }
    if (d_queries) {
      alignas(64) T ones[round_up(tile_rows, width<T>)];
      std::fill_n(ones, std::size(ones), T(1));
      if (of.keys.all_finite(low, high + 1))
        add_output(by_distance, ones, of.keys, low, high + 1, t.rows, d_queries, to.stride);
      else
        careful_output(by_distance, ones, of.keys, low, high + 1, t.rows, d_queries, to.stride);
    }
    for (idx_t slot = low; to.d_keys && slot <= high; slot += tile_rows) {
      const idx_t some = std::min<idx_t>(tile_rows, high + 1 - slot);
      add_transposed(by_distance + slot - low, queries, t.rows, some, dim, finite, to.d_keys + slot * d_stride, d_stride);
    }
  }

  /// Numbers of the sums of r's gradient of a head, with rows that whole tiles write.
  static idx_t sums_size(const packed_distances<T>& of) {
    return (of.count() + tile_rows) * sums_stride<T>(of.keys.dim);
  }

 private:
  /// The slot of a distance, which may be no multiple of the step only beyond the table.
  static idx_t slot_of(const packed_distances<T>& of, idx_t distance) {
    return std::clamp(distance / of.step, -of.reach, of.reach) + of.reach;
  }
  /// The slots of a tile whose row 0 is `first` steps from its first key.
  static key_range slots_of(const packed_distances<T>& of, idx_t first, const tile& t) {
    return {std::clamp(first - t.rows + 1, -of.reach, of.reach) + of.reach,
            std::clamp(first + t.count - 1, -of.reach, of.reach) + of.reach + 1};
  }
  /// Which of so many keys are within reach of a row that is `first` steps from the first.
  static key_range within(const packed_distances<T>& of, idx_t first, idx_t keys) {
    const idx_t begin = std::clamp(-of.reach - first, idx_t(0), keys);
    return {begin, std::clamp(of.reach - first + 1, begin, keys)};
  }
  /// sums[n][c] += sum over the rows m < depth of d[m][n] queries[m][c], n < slots.
  static void add_transposed(const T* d, const T* queries, idx_t depth, idx_t slot_count, idx_t dim, bool finite,
                             T* sums, idx_t stride) {
    if (finite) {
      products_of_rows<T>(slot_count, left_operand<T, 1, score_stride>{d}, queries, max_rows * panel_width<T>, 0, dim,
                          depth, [&](auto m, idx_t col, const auto& x) {
                            T* const to = sums + m * stride + col;
                            store<T>(to, add(load<T>(to), x));
                          });
      return;
    }
    for (idx_t n = 0; n < slot_count; ++n)
      for (idx_t m = 0; m < depth; ++m)
        for (idx_t c = 0; d[m * score_stride + n] != T(0) && c < dim; ++c)
          sums[n * stride + c] += d[m * score_stride + n] *
                                  queries[c / panel_width<T> * panel_width<T> * max_rows + m * panel_width<T> +
                                          c % panel_width<T>];
  }
};

}}}  // namespace attn::ATTN_ISA::detail
