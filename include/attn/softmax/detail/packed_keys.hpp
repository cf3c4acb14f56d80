// attn: keys and values of one head, or of a range of it, packed for the blockwise kernel.
#pragma once

#include <attn/core/detail/prefetch.hpp>
#include <attn/core/detail/tile_product.hpp>
#include <attn/core/execution.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The row of the sequence that each slot has: first + step * slot, or a list.
struct index_map {
  idx_t first = 0, step = 1;
  const idx_t* list = nullptr;

  idx_t operator[](idx_t slot) const { return list ? list[slot] : first + step * slot; }
  /// The map of the slots from `slot` on.
  index_map from(idx_t slot) const { return {first + step * slot, step, list ? list + slot : nullptr}; }

  /// The slot of a row among the slots [begin, end), whose rows ascend, or -1.
  idx_t find(idx_t row, idx_t begin, idx_t end) const {
    const idx_t slot = list ? std::lower_bound(list + begin, list + end, row) - list : (row - first) / step;
    return slot >= begin && slot < end && (*this)[slot] == row ? slot : -1;
  }
};

/// The slots [begin, end) that a query sees.
struct key_range {
  idx_t begin = 0, end = 0;
};

/// Slots [0, count) of keys and values. Keys are the columns of panels [dim][panel_width]; values the rows of panels
/// [capacity][panel_width]. `finite` says, for every panel_width slots, whether all their values are finite: values
/// that are not are multiplied only for the rows that see them. T may be bf16_pair: pairs of dims of the keys, of slots
/// of the values.
template <class T>
struct packed_keys {
  static constexpr idx_t wide = panel_width<T>;
  static constexpr idx_t read_together = rows_for_matrix_unit<T> ? wide : width<T>;  // keys, by the blockwise kernel

  T *keys = nullptr, *values = nullptr;
  bool* finite = nullptr;
  idx_t capacity = 0, dim = 0, dim_v = 0;
  index_map positions{};
  line_prefetcher* next = nullptr;  // what the products with these keys prefetch

  /// Memory for `slots` slots; (slots + panel) * (dim + dim_v + panel) numbers at most.
  static packed_keys layout(arena& memory, idx_t slot_count, idx_t dim, idx_t dim_v) {
    const idx_t capacity = round_up(slot_count, wide);
    return {.keys = memory.allocate<T>(capacity * operands<T>(dim)),
            .values = memory.allocate<T>(operands<T>(capacity) * round_up(dim_v, wide)),
            .finite = memory.allocate<bool>(capacity / wide), .capacity = capacity, .dim = dim, .dim_v = dim_v};
  }

  /// Fills slots [begin, end) from the rows `positions` names of matrices, or of cache_rows; begin is a multiple of
  /// the panel width. Keys fill whole units. While a panel is packed, the rows of the next one are fetched.
  template <class Keys, class Values>
  void pack(const Keys& k, const Values& v, idx_t begin, idx_t end, idx_t unit = read_together) {
    for (idx_t slot = begin; slot < end; slot += wide) {
      const idx_t stop = (std::min)(slot + wide, end);
      for (idx_t n = stop; n < (std::min)(stop + wide, end); ++n) {
        prefetch_row(k, positions[n]);
        prefetch_row(v, positions[n]);
      }
      pack_keys([&](idx_t n) { return k.row(positions[slot + n]); }, k.col_stride, slot, stop, unit);
      pack_value_rows([&](idx_t n) { return v.row(positions[n]); }, v.col_stride, slot, stop);
    }
  }
  /// The keys of these slots are key_row(0), key_row(1), ... They fill whole units.
  template <class Row>
  void pack_keys(Row&& key_row, idx_t col_stride, idx_t begin, idx_t end, idx_t unit = wide) {
    pack_panels_across<T>(key_row, end - begin, dim, col_stride, keys + begin * operands<T>(dim), unit);
  }
  /// The values of these slots are value_row(begin), value_row(begin + 1), ...
  template <class Row>
  void pack_value_rows(Row&& value_row, idx_t col_stride, idx_t begin, idx_t end) {
    for (idx_t slot = begin; slot < end; slot += wide) {
      const idx_t count = (std::min)(wide, end - slot);
      finite[slot / wide] = pack_panels<T>(value_row, slot, count, dim_v, col_stride, values, capacity);
      if constexpr (rows_for_matrix_unit<T>)  // tiles of fixed places take whole panels
        for (idx_t col = 0, from = operands<T>(count), to = operands<T>(wide); from < to && col < dim_v; col += wide)
          std::fill(values + col * operands<T>(capacity) + (operands<T>(slot) + from) * wide,
                    values + col * operands<T>(capacity) + (operands<T>(slot) + to) * wide, T{});
    }
  }

  /// The slots from `slot` on, a multiple of the panel width, with a map of their own.
  packed_keys from(idx_t slot, const index_map& map) const {
    packed_keys rest = *this;
    rest.keys += slot * operands<T>(dim);
    rest.values += operands<T>(slot) * wide;
    rest.finite += slot / wide;
    rest.positions = map;
    return rest;
  }

  const T* key_panel(idx_t slot) const { return keys + slot * operands<T>(dim); }
  const T* value_panel(idx_t col, idx_t slot) const {
    return values + col * operands<T>(capacity) + operands<T>(slot) * wide;
  }

  /// The value of one slot, in pieces of a panel that are value_stride() apart.
  const T* value_row(idx_t slot) const { return value_panel(0, slot); }
  idx_t value_stride() const { return operands<T>(capacity) * wide; }

  bool all_finite(idx_t begin, idx_t end) const {
    bool all = true;
    for (idx_t panel = begin / wide; panel * wide < end; ++panel) all &= finite[panel];
    return all;
  }
};

}}}  // namespace attn::ATTN_ISA::detail
