// attn: the memory of the backward kernel of exact softmax attention: packed queries, keys and gradients, and the sums
// of gradients (blockwise_backward.hpp).
#pragma once

#include <attn/core/detail/gradients.hpp>
#include <attn/core/detail/prefetch.hpp>
#include <attn/core/detail/sums_in_parts.hpp>
#include <attn/softmax/detail/blockwise.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

inline constexpr idx_t backward_key_block = 256;  // keys of a block, at most score_stride

/// The queries of one head with all that their gradients need, packed in blocks of max_rows.
template <class P>
struct backward_rows {
  using T = sum_type<P>;
  static constexpr bool paired = numbers_of<P> > 1;

  P *queries = nullptr, *d_out = nullptr;              // per block, panels [max_rows][panel_width]
  P *query_tiles = nullptr, *d_out_tiles = nullptr;    // the same as left operands, per tile in chunks
  T *maximum = nullptr, *log_sum = nullptr;            // per row: lse in base 2 in two parts, 0 where no key is seen
  T* delta = nullptr;                                  // per row: D
  bool* finite = nullptr;                              // per block: whether all queries and gradients are finite
  T* relative = nullptr;                               // as panels: the queries of relative keys
  idx_t dim = 0, dim_v = 0;
  idx_t capacity = 0;                                  // rows in whole blocks

  static backward_rows layout(arena& memory, idx_t rows, idx_t dim, idx_t dim_v, bool with_relative = false) {
    const idx_t padded = round_up(rows, max_rows);
    const auto tiles = [&](idx_t depth) { return memory.allocate<P>(padded * row_chunk_operands<P>(depth)); };
    return {.queries = memory.allocate<P>(operands<P>(padded) * round_up(dim, panel_width<T>)),
            .d_out = memory.allocate<P>(operands<P>(padded) * round_up(dim_v, panel_width<T>)),
            .query_tiles = tiles(dim), .d_out_tiles = tiles(dim_v), .maximum = memory.allocate<T>(padded),
            .log_sum = memory.allocate<T>(padded), .delta = memory.allocate<T>(padded),
            .finite = memory.allocate<bool>(padded / max_rows),
            .relative = with_relative ? memory.allocate<T>(padded * round_up(dim, panel_width<T>)) : nullptr,
            .dim = dim, .dim_v = dim_v, .capacity = padded};
  }

  /// The rows from row `first` on, a multiple of max_rows.
  backward_rows from(idx_t first) const {
    backward_rows rest = *this;
    rest.queries += first / numbers_of<P> * round_up(dim, panel_width<T>);
    rest.d_out += first / numbers_of<P> * round_up(dim_v, panel_width<T>);
    rest.query_tiles += first * row_chunk_operands<P>(dim), rest.d_out_tiles += first * row_chunk_operands<P>(dim_v);
    if (relative) rest.relative += first * round_up(dim, panel_width<T>);
    rest.capacity -= first;
    rest.maximum += first, rest.log_sum += first, rest.delta += first, rest.finite += first / max_rows;
    return rest;
  }

  /// Fetches the tile that begins with row `first`, which may be the first of the next block, and its row of
  /// `sums` [rows][stride], if given, into the second-level cache: those of long sequences come from the third for
  /// every block of keys.
  void prefetch_tile(idx_t first, const T* sums, idx_t stride) const {
    if (first >= capacity) return;
    const auto fetch = [first](const auto* rows, idx_t size) {
      prefetch_bytes(reinterpret_cast<const char*>(rows + first * size), tile_rows * size * idx_t(sizeof *rows));
    };
    fetch(query_tiles, row_chunk_operands<P>(dim)), fetch(d_out_tiles, row_chunk_operands<P>(dim_v));
    if (sums) fetch(sums, stride);
  }

  /// Packs one block: the `rows` <= max_rows rows positions[...] of q, times `factor` as left operands, unless these
  /// are pairs, and of d_out. The caller fills in the rest.
  template <class S>
  void pack(const matrix_view<const S>& q, const matrix_view<const S>& d, const index_map& positions,
            idx_t rows, T factor) const {
    const auto pack_one = [&](const matrix_view<const S>& x, idx_t depth, T by, P* panels, P* tiles) {
      for (idx_t r = 0; r < rows; r += tile_rows)
        pack_row_chunks<P>([&](idx_t i) { return x.row(positions[r + i]); }, std::min<idx_t>(tile_rows, rows - r),
                           depth, x.col_stride, by, tiles + r * row_chunk_operands<P>(depth));
      return pack_panels<P>([&](idx_t i) { return x.row(positions[i]); }, 0, rows, depth, x.col_stride, panels,
                            max_rows);
    };
    const bool finite_q = pack_one(q, dim, paired ? T(1) : factor, queries, query_tiles);
    *finite = pack_one(d, dim_v, T(1), d_out, d_out_tiles) && finite_q;
  }
  /// The same rows of the queries of relative keys, after pack().
  template <class S>
  void pack_relative(const matrix_view<const S>& q, const index_map& positions, idx_t rows) const {
    *finite &= pack_panels<T>([&](idx_t i) { return q.row(positions[i]); }, 0, rows, dim, q.col_stride, relative,
                              max_rows);
  }
};

/// Rows [first, first + rows) of the panels of a block, times `factor`, as a tile [dim][tile_rows].
template <class T>
void tile_of_panels(const T* panels, idx_t first, idx_t rows, idx_t dim, T factor, T* tile) {
  constexpr idx_t wide = panel_width<T>;
  for (idx_t col = 0; col < dim; col += wide)
    pack_rows<T>([&](idx_t i) { return panels + col * max_rows + (first + i) * wide; }, rows,
                 (std::min)(wide, dim - col), 1, factor, tile + col * tile_rows);
}

/// Keys and values of one head packed for the products of the backward pass, and the sums of the gradients that are
/// wanted.
template <class P>
struct backward_keys {
  using T = sum_type<P>;

  packed_keys<P> keys;    // as columns for S; as rows, in the place of values, for dQ
  packed_keys<P> values;  // as columns for d_out V^T
  T *d_keys = nullptr, *d_values = nullptr;  // [slots][round_up(dim, panel_width)]; null: not wanted
  T *key_errors = nullptr, *value_errors = nullptr;  // the same, what these sums lost; null: not kept

  static idx_t stride(idx_t dim) { return sums_stride<T>(dim); }

  static backward_keys layout(arena& memory, idx_t slot_count, idx_t dim, idx_t dim_v, bool want_keys = true,
                              bool want_values = true, bool errors = false) {
    backward_keys k{.keys = packed_keys<P>::layout(memory, slot_count, dim, dim),
                    .values = packed_keys<P>::layout(memory, slot_count, dim_v, 0)};
    k.layout_sums(memory, k.keys.capacity, want_keys, want_values, errors);
    return k;
  }
  void layout_sums(arena& memory, idx_t count, bool want_keys, bool want_values, bool errors) {
    const idx_t of_keys = count * stride(keys.dim), of_values = count * stride(values.dim);
    if (want_keys) d_keys = memory.allocate<T>(of_keys);
    if (want_values) d_values = memory.allocate<T>(of_values);
    if (want_keys && errors) key_errors = memory.allocate<T>(of_keys);
    if (want_values && errors) value_errors = memory.allocate<T>(of_values);
  }

  /// Fills slots [begin, end) and clears their gradients; begin is a multiple of the panel width.
  template <class S>
  void pack(const matrix_view<const S>& k, const matrix_view<const S>& v, idx_t begin, idx_t end) {
    fill(k, v, begin, end);
    clear(begin, end);
  }
  template <class Keys, class S>
  void fill(const Keys& k, const matrix_view<const S>& v, idx_t begin, idx_t end) {
    keys.pack(k, k, begin, end);
    values.pack_keys([&](idx_t slot) { return v.row(keys.positions[begin + slot]); }, v.col_stride, begin, end,
                     packed_keys<P>::read_together);
  }
  void clear(idx_t begin, idx_t end) const { clear_rows(begin, round_up(end, panel_width<T>)); }
  /// Clears the sums of slots [begin, end) alone.
  void clear_rows(idx_t begin, idx_t end) const {
    for (T* x : {d_keys, key_errors})
      if (x) std::fill_n(x + begin * stride(keys.dim), (end - begin) * stride(keys.dim), T(0));
    for (T* x : {d_values, value_errors})
      if (x) std::fill_n(x + begin * stride(values.dim), (end - begin) * stride(values.dim), T(0));
  }
  /// Adds what the sums of slots [begin, end) lost.
  void settle(idx_t begin, idx_t end) const {
    const auto one = [&](T* sums, const T* errors, idx_t size) {
      if (errors) settle_compensated(sums + begin * size, errors + begin * size, (end - begin) * size, sums + begin * size);
    };
    one(d_keys, key_errors, stride(keys.dim)), one(d_values, value_errors, stride(values.dim));
  }

  static constexpr idx_t wide = packed_keys<P>::wide;

  /// The slots from `slot` on, a multiple of the panel width, with a map of their own and without sums.
  backward_keys from(idx_t slot, const index_map& map) const {
    return {.keys = keys.from(slot, map), .values = values.from(slot, map)};
  }

  /// The sums become those of others, from their slot `slot` on.
  void use_sums(const backward_keys& of, idx_t slot) {
    const auto from = [slot](T* sums, idx_t size) { return sums ? sums + slot * size : nullptr; };
    d_keys = from(of.d_keys, stride(keys.dim)), d_values = from(of.d_values, stride(values.dim));
    key_errors = from(of.key_errors, stride(keys.dim)), value_errors = from(of.value_errors, stride(values.dim));
  }

  /// Stores slots [begin, end) as the rows of the gradients of k, times `scale`, and of v, each of which may be null:
  /// as those `positions` names, where it is a list, else of the same numbers, and rows from `real` on are padding.
  template <class S>
  void store(const tensor_view<S>& dk, const tensor_view<S>& dv, idx_t b, idx_t h, idx_t begin, idx_t end, idx_t real,
             T scale, bool accumulate) const {
    settle(begin, (std::min)(end, real));
    for (idx_t slot = begin; keys.positions.list && slot < end; ++slot) {
      const idx_t row = keys.positions[slot];
      if (dk) store_gradient_row(d_keys + slot * stride(keys.dim), scale, head_of(dk, b, h), row, accumulate);
      if (dv) store_gradient_row(d_values + slot * stride(values.dim), T(1), head_of(dv, b, h), row, accumulate);
    }
    if (keys.positions.list) return;
    if (dk) store_gradient_rows(d_keys, stride(keys.dim), scale, head_of(dk, b, h), begin, end, real, accumulate);
    if (dv) store_gradient_rows(d_values, stride(values.dim), T(1), head_of(dv, b, h), begin, end, real, accumulate);
  }
};

/// Whether sums over so many queries keep their errors: beyond 350 blocks of rows, one large gradient could swallow too
/// much of small ones.
constexpr bool many_queries(idx_t queries) { return queries > 32768; }

template <class P>
struct backward_scratch {
  using T = sum_type<P>;

  P *weights = nullptr, *d_scores = nullptr;       // [max_rows][score_stride], rows in pairs
  T *tile_weights = nullptr, *tile_d = nullptr;    // with pairs: a tile of these as numbers, [tile_rows][score_stride],
  P* tile_pairs = nullptr;                         // and of dS with its slots in pairs
  T* raw = nullptr;                                // [tile_rows][score_stride], where the terms of the scores need them
  key_range* ranges = nullptr;                     // [max_rows]: slots a row sees of this block of keys
  T* part = nullptr;                               // [tile_rows][stride]: what a block of rows adds to sums with errors
  T *long_dq = nullptr, *long_errors = nullptr;    // [max_rows][stride]: dq of rows that see many keys
  T* relative = nullptr;                           // one tile [dim][tile_rows] of the queries of relative keys
  T* position_d = nullptr;                         // of position queries: dS, between tile_rows rows of zeros
  T* key_rows = nullptr;                           // with pairs: the keys as rows of numbers, as values
  bool fixed = false;                              // whether blocks and tiles have fixed places (blockwise.hpp)

  static constexpr idx_t key_row_count = backward_key_block + panel_width<T>;

  static backward_scratch layout(arena& memory, idx_t dim, idx_t dim_v, bool with_raw, bool with_relative = false,
                                 bool with_positions = false) {
    constexpr idx_t paired = numbers_of<P> > 1, tile = tile_rows * score_stride;
    const idx_t dim_panels = round_up(dim, panel_width<T>), whole_rows = round_up(max_rows, tile_rows);
    backward_scratch s{.weights = memory.allocate<P>(operands<P>(max_rows) * score_stride),
                       .d_scores = memory.allocate<P>(operands<P>(max_rows) * score_stride),
                       .tile_weights = memory.allocate<T>(paired * tile), .tile_d = memory.allocate<T>(paired * tile),
                       .tile_pairs = memory.allocate<P>(paired * operands<P>(tile)),
                       .raw = with_raw ? memory.allocate<T>(tile) : nullptr,
                       .ranges = memory.allocate<key_range>(max_rows),
                       .part = memory.allocate<T>(tile_rows * round_up((std::max)(dim, dim_v), panel_width<T>)),
                       .long_dq = memory.allocate<T>(whole_rows * dim_panels),
                       .long_errors = memory.allocate<T>(whole_rows * dim_panels),
                       .relative = with_relative ? memory.allocate<T>(tile_rows * dim) : nullptr};
    if (!with_positions) return s;
    s.position_d = memory.allocate<T>((max_rows + 2 * tile_rows) * score_stride) + tile;
    s.key_rows = memory.allocate<T>(paired * key_row_count * dim_panels);
    if constexpr (!paired) s.d_scores = s.position_d;
    return s;
  }
};

}}}  // namespace attn::ATTN_ISA::detail
