// attn: position queries: k_j.r'[h, clamp(j - p_i, -R, R) + R] joins the product of a score.
//
// Along a row of a tile the distances of the keys ascend by one. So r' lies as the keys do, [dim][distances]: a packet
// of adjacent keys is multiplied with the packet of r' that begins at the distance of its first one, for the next row
// with the one a distance before that. No product is taken but those of the tile's pairs. Where rows or keys are
// listed, as beside global tokens, products are taken one by one.
#pragma once

#include <attn/core/detail/split_pair.hpp>
#include <attn/softmax/detail/relative_keys.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The first and the second numbers of a packet of pairs at p, of a right operand.
template <class P>
ATTN_INLINE void load_numbers(const P* p, [[maybe_unused]] idx_t stride, packet<float>& first, packet<float>& second) {
  const word_lanes bits = bits_as<word_lanes>(load<P>(p));
  first = bits_as<packet<float>>(bits << 16), second = bits_as<packet<float>>(bits & 0xffff0000u);
  if constexpr (is_split<P>) {
    const word_lanes rest = bits_as<word_lanes>(load<P>(p + stride));
    first = add(first, bits_as<packet<float>>(rest << 16));
    second = add(second, bits_as<packet<float>>(rest & 0xffff0000u));
  }
}

/// Number d of the key in a slot.
template <class P>
sum_type<P> number_of_key(const packed_keys<P>& keys, idx_t slot, idx_t d) {
  constexpr idx_t wide = packed_keys<P>::wide;
  const P* const x = keys.key_panel(slot / wide * wide) + slot % wide;
  if constexpr (numbers_of<P> == 1) {
    return x[d * wide];
  } else {
    const auto number = [&](idx_t more) {
      const std::uint32_t bits = x[(d / 2 * operand<P>::operands + more) * wide].bits;
      return std::bit_cast<float>(d % 2 == 0 ? bits << 16 : bits & 0xffff0000u);
    };
    if constexpr (is_split<P>) return number(0) + number(1);
    return number(0);
  }
}

/// The position queries of a head: slot `middle()` is that of distance 0, and the first and the last one are repeated
/// by `margin` more, so that a range of slots of that length has a place, whatever its distances.
template <class T>
struct packed_position_queries {
  static constexpr idx_t step_of_blocks = 128;  // slots; the blocks overlap by what a tile reads at once
  static constexpr idx_t tile_slots = panel_width<T> + tile_rows - 1;
  static constexpr idx_t lanes_of_line = cache_line / sizeof(T);
  /// Rows of a block begin in different cache sets.
  static constexpr int stride = (ceil_div(step_of_blocks + tile_slots, lanes_of_line) | 1) * lanes_of_line;

  T* columns = nullptr;   // per block [dim][stride], scaled
  packed_keys<T> rows{};  // backward: as values
  idx_t dim = 0, reach = 0, step = 1, margin = 0;

  idx_t middle() const { return reach + margin; }
  idx_t count() const { return 2 * middle() + 1; }
  idx_t depth() const { return round_up(dim, 2); }
  /// The slot of a distance in steps, with `after` more slots.
  idx_t slot(idx_t distance, idx_t after = 0) const {
    return std::clamp(distance + middle(), idx_t(0), count() - 1 - after);
  }
  /// tile_slots slots from that of a distance on, as rows of `stride`.
  const T* window(idx_t distance) const {
    const idx_t first = slot(distance, tile_slots);
    return columns + first / step_of_blocks * depth() * stride + first % step_of_blocks;
  }
};

/// Those of all heads of a call; null: none.
template <class T>
struct position_queries : distance_tables<T, packed_position_queries<T>> {
  using packed_head = packed_position_queries<T>;
  using base = distance_tables<T, packed_head>;
  using base::table, base::heads, base::row_of_table, base::in_a_row;

  /// Memory for those of a range.
  static position_queries layout(arena& memory, const tensor_view<const T, 3>& table, idx_t query_heads,
                                 const distance_range& range) {
    position_queries of;
    of.layout_heads(memory, table, query_heads, range, [&](arena& m, idx_t step, idx_t reach) {
      packed_head one{.dim = table.extent(2), .reach = reach, .step = step};
      one.margin = packed_head::tile_slots + (range.rows_too ? max_rows + tile_rows : 0);
      one.columns =
          m.allocate<T>(ceil_div(one.count(), packed_head::step_of_blocks) * one.depth() * packed_head::stride);
      if (range.rows_too) one.rows = packed_keys<T>::layout(m, one.count(), 0, one.dim);
      return one;
    });
    return of;
  }
  /// `factor`: that of the queries.
  void pack(idx_t n, T factor) const {
    packed_head& to = heads[n];
    const distance_rows<T> row{table, n, to.step, to.middle()};
    T* block = to.columns;
    for (idx_t first = 0; first < to.count(); first += packed_head::step_of_blocks, block += to.depth() * to.stride) {
      for (idx_t x = 0; x < to.stride; x += width<T>)
        pack_across<T, packed_head::stride>(row_pointers<T, T>(row, first + x, first + to.stride), to.dim,
                                            table.stride(2), factor, block + x);
      if (to.depth() > to.dim) std::fill_n(block + to.dim * to.stride, to.stride, T(0));
    }
    if (to.rows.capacity > 0) to.rows.pack_value_rows(row, table.stride(2), 0, to.count());
  }

  /// s[m][n] += factor k_n.r' of the scores of a tile, of queries at positions which[m] + shift.
  template <class P>
  [[gnu::noinline]] void add_tile(const packed_keys<P>& keys, const index_map& which, idx_t shift, idx_t h,
                                  const tile& t, T factor, T* s) const {
    constexpr idx_t wide = panel_width<T>;
    if (const packed_head* of = in_a_row(h, which, keys.positions)) {
      const idx_t first = (keys.positions[t.first] - which[0] - shift) / of->step;
      for (idx_t n = 0; n < t.count;) {
        const idx_t slot = t.first + n, half = slot % wide;
        const T* const window = of->window(first + n - (tile_rows - 1));
        if (half == 0 && t.count - n >= wide) {
          add_products<2>(keys.key_panel(slot), window, keys.dim, s + n);
          n += wide;
        } else {
          add_products<1>(keys.key_panel(slot - half) + half, window, keys.dim, s + n);
          n += width<T>;
        }
      }
      return;
    }
    for (idx_t m = 0; m < t.rows; ++m)
      for (idx_t slot = t.low; slot < t.high; ++slot) {
        const T* const r = row_of_table(h, keys.positions[slot] - which[m] - shift);
        T sum = 0;
        for (idx_t d = 0; d < keys.dim; ++d) sum += number_of_key(keys, slot, d) * r[d * table.stride(2)];
        s[m * score_stride + slot - t.first] += factor * sum;
      }
  }

  /// The same for a query at position p and the rows of `keys`, which are those of slots slot + n, n < some.
  [[gnu::noinline]] void add_one_by_one(const matrix_view<const T>& keys, T factor, T* s, idx_t some, idx_t h, idx_t p,
                                        const index_map& positions, idx_t slot) const {
    for (idx_t n = 0; n < some; ++n)
      s[n] += factor * row_dot<T>(keys.row(n), keys.col_stride, row_of_table(h, positions[slot + n] - p),
                                  table.stride(2), table.extent(2));
  }

  /// Numbers of the sums of the gradient of r' of a head, with rows that whole tiles write.
  static idx_t sums_size(const packed_head& of) { return (of.count() + tile_rows) * sums_stride<T>(of.dim); }

 private:
  /// N packets of keys with all rows that a tile may have: one copy serves those that have fewer. The window begins at
  /// the distance of the first key from the last row.
  template <int N, class P>
  static ATTN_INLINE void add_products(const P* panel, const T* window, idx_t dim, T* s) {
    constexpr idx_t wide = panel_width<T>;
    constexpr int M = tile_rows;
    [&]<int... At>(std::integer_sequence<int, At...>) __attribute__((always_inline)) {
      packet<T> acc[array_size<M * N>] = {load<T>(s + At / N * score_stride + At % N * width<T>)...};
      const auto add_row = [&](const packet<T>(&key)[array_size<N>], const T* r) __attribute__((always_inline)) {
        ((acc[At] = fma(key[At % N], load<T>(r + (M - 1 - At / N) + At % N * width<T>), acc[At])), ...);
      };
      if constexpr (numbers_of<P> == 1) {
        for (idx_t d = 0; d < dim; ++d, panel += wide, window += packed_head::stride) {
          packet<T> key[array_size<N>];
          for (int n = 0; n < N; ++n) key[n] = load<T>(panel + n * width<T>);
          add_row(key, window);
        }
      } else {
        for (idx_t d = 0; d < dim; d += 2, panel += operand<P>::operands * wide, window += 2 * packed_head::stride) {
          packet<T> first[array_size<N>], second[array_size<N>];
          for (int n = 0; n < N; ++n) load_numbers(panel + n * width<T>, wide, first[n], second[n]);
          add_row(first, window), add_row(second, window + packed_head::stride);
        }
      }
      (store<T>(s + At / N * score_stride + At % N * width<T>, acc[At]), ...);
    }(std::make_integer_sequence<int, M * N>{});
  }
};

}}}  // namespace attn::ATTN_ISA::detail
