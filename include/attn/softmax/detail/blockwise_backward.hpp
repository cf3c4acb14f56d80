// attn: the one backward kernel of exact softmax attention.
//
// With P_ij = e^(s_ij - lse_i), s the final scores, and D_i = d_out_i . out_i - d_lse_i (Dao 2022):
//
//   dV_j  = sum_i P_ij d_out_i
//   dS_ij = P_ij (d_out_i . v_j - D_i)                       gradient of the final scores
//   dQ_i  = scale sum_j dS'_ij k_j,  dK_j = scale sum_i dS'_ij q_i      dS' = dS through the terms of the scores
//
// backward_block() handles a block of rows (backward_rows) with a block of keys (backward_keys):
//
//   for every tile of rows:
//     1. P = 2^(S - lse)               masked_scores, as forward
//     2. dS = P (d_out V^T - D)        tile_scores
//     3. terms                         only where there are any
//     4. dQ += dS K                    tile_output
//   for every tile of keys:
//     5. dV += P^T d_out, dK += dS^T Q    over the rows that see it
//
// P and dS of a block (2 x 96 KiB in float) and the packed keys stay in the second-level cache: on Zen 5, 4096 tokens in
// float, full_softmax_backward takes 2.5 to 2.6 times its forward call with blocks of 192, 256 and 384 keys alike. A
// second pass for dQ, by blocks of queries, would take seven products where this takes five. A key whose weight is
// exactly 0 contributes to no gradient, even if its value, key, query or gradient is NaN.
//
// With bf16 pairs (P, see blockwise.hpp), weights and dS are rounded for step 4, as pairs of slots, and for step 5, as
// pairs of rows.
#pragma once

#include <attn/core/detail/gradients.hpp>
#include <attn/softmax/detail/blockwise.hpp>

namespace attn::inline ATTN_ISA::detail {

inline constexpr index backward_key_block = 256;  // keys of a block, at most score_stride

/// The queries of one head with all that their gradients need, packed in blocks of max_rows.
template <class P>
struct backward_rows {
  using T = sum_type<P>;
  static constexpr bool paired = numbers_of<P> > 1;

  P *queries = nullptr, *d_out = nullptr;              // per block, panels [max_rows][panel_width]
  P *query_tiles = nullptr, *d_out_tiles = nullptr;    // of pairs: per tile [dim][tile_rows]
  T *lse = nullptr, *delta = nullptr;                  // per row: lse in base 2, 0 where no key is seen; D
  bool* finite = nullptr;                              // per block: whether all queries and gradients are finite
  index dim = 0, dim_v = 0;

  static backward_rows layout(arena& memory, index rows, index dim, index dim_v) {
    const index padded = round_up(rows, max_rows);
    const auto tiles = [&](index depth) {
      return paired ? memory.allocate<P>(padded * row_operands<P>(depth)) : nullptr;
    };
    return {.queries = memory.allocate<P>(operands<P>(padded) * round_up(dim, panel_width<T>)),
            .d_out = memory.allocate<P>(operands<P>(padded) * round_up(dim_v, panel_width<T>)),
            .query_tiles = tiles(dim),
            .d_out_tiles = tiles(dim_v),
            .lse = memory.allocate<T>(padded),
            .delta = memory.allocate<T>(padded),
            .finite = memory.allocate<bool>(padded / max_rows),
            .dim = dim,
            .dim_v = dim_v};
  }

  /// The rows from row `first` on, a multiple of max_rows.
  backward_rows from(index first) const {
    backward_rows rest = *this;
    rest.queries += first / numbers_of<P> * round_up(dim, panel_width<T>);
    rest.d_out += first / numbers_of<P> * round_up(dim_v, panel_width<T>);
    if constexpr (paired)
      rest.query_tiles += first * row_operands<P>(dim), rest.d_out_tiles += first * row_operands<P>(dim_v);
    rest.lse += first, rest.delta += first, rest.finite += first / max_rows;
    return rest;
  }

  /// Packs one block: the `rows` <= max_rows rows positions[...] of q and d_out. The caller fills in lse and delta.
  template <class S>
  void pack(const matrix_view<const S>& q, const matrix_view<const S>& d, const index_map& positions,
            index rows) const {
    const auto pack_one = [&](const matrix_view<const S>& x, index depth, P* panels, P* tiles) {
      for (index r = 0; paired && r < rows; r += tile_rows)
        pack_rows<P>([&](index i) { return x.row(positions[r + i]); }, std::min<index>(tile_rows, rows - r), depth,
                     x.col_stride, T(1), tiles + r * row_operands<P>(depth));
      return pack_panels<P>([&](index i) { return x.row(positions[i]); }, 0, rows, depth, x.col_stride, panels,
                            max_rows);
    };
    const bool finite_q = pack_one(q, dim, queries, query_tiles);
    *finite = pack_one(d, dim_v, d_out, d_out_tiles) && finite_q;
  }
};

/// Rows [first, first + rows) of the panels of a block, times `factor`, as a tile [dim][tile_rows]. Cheaper than a second
/// packed form of all rows, which would have to come from the third-level cache for every block of keys.
template <class T>
void tile_of_panels(const T* panels, index first, index rows, index dim, T factor, T* tile) {
  constexpr index wide = panel_width<T>;
  for (index col = 0; col < dim; col += wide)
    pack_rows<T>([&](index i) { return panels + col * max_rows + (first + i) * wide; }, rows, std::min(wide, dim - col),
                 1, factor, tile + col * tile_rows);
}

/// Keys and values of one head packed for the products of the backward pass, and the sums of the gradients that are
/// wanted.
template <class P>
struct backward_keys {
  using T = sum_type<P>;

  packed_keys<P> keys;    // as columns for S; as rows, in the place of values, for dQ
  packed_keys<P> values;  // as columns for d_out V^T
  T *d_keys = nullptr, *d_values = nullptr;  // [slots][round_up(dim, panel_width)]; null: not wanted

  static index stride(index dim) { return round_up(dim, panel_width<T>); }

  static backward_keys layout(arena& memory, index slots, index dim, index dim_v, bool want_keys = true,
                              bool want_values = true) {
    backward_keys k{.keys = packed_keys<P>::layout(memory, slots, dim, dim),
                    .values = packed_keys<P>::layout(memory, slots, dim_v, 0)};
    if (want_keys) k.d_keys = memory.allocate<T>(k.keys.capacity * stride(dim));
    if (want_values) k.d_values = memory.allocate<T>(k.keys.capacity * stride(dim_v));
    return k;
  }

  /// Fills slots [begin, end) and clears their gradients; begin is a multiple of the panel width.
  template <class S>
  void pack(const matrix_view<const S>& k, const matrix_view<const S>& v, index begin, index end) {
    fill(k, v, begin, end);
    clear(begin, end);
  }
  template <class S>
  void fill(const matrix_view<const S>& k, const matrix_view<const S>& v, index begin, index end) {
    keys.pack(k, k, begin, end);
    values.pack_keys([&](index slot) { return v.row(keys.positions[begin + slot]); }, v.col_stride, begin, end);
  }
  void clear(index begin, index end) const {
    const index padded = round_up(end, panel_width<T>) - begin;
    if (d_keys) std::fill_n(d_keys + begin * stride(keys.dim), padded * stride(keys.dim), T(0));
    if (d_values) std::fill_n(d_values + begin * stride(values.dim), padded * stride(values.dim), T(0));
  }

  /// The slots from `slot` on, a multiple of the panel width, with a map of their own. The caller sets their sums.
  backward_keys from(index slot, const index_map& map) const {
    return {.keys = keys.from(slot, map), .values = values.from(slot, map)};
  }

  /// Stores slots [begin, end) as the rows of the same numbers of the gradients of k, times `scale`, and of v, each of
  /// which may be null; rows from `real` on are padding.
  template <class S>
  void store(const tensor_view<S>& dk, const tensor_view<S>& dv, index b, index h, index begin, index end, index real,
             T scale, bool accumulate) const {
    if (dk) store_gradient_rows(d_keys, stride(keys.dim), scale, head_of(dk, b, h), begin, end, real, accumulate);
    if (dv) store_gradient_rows(d_values, stride(values.dim), T(1), head_of(dv, b, h), begin, end, real, accumulate);
  }
};

/// sums[x] += sums[offset + x] for x in [begin, end), of whole packets; null: none.
template <class T>
void add_sums(T* sums, index offset, index begin, index end) {
  for (index x = begin; sums && x < end; x += width<T>)
    store<T>(sums + x, add(load<T>(sums + x), load<T>(sums + offset + x)));
}

/// Scratch of one worker.
template <class P>
struct backward_scratch {
  using T = sum_type<P>;

  P *weights = nullptr, *d_scores = nullptr;       // [max_rows][score_stride], rows in pairs
  T *tile_weights = nullptr, *tile_d = nullptr;    // with pairs: a tile of these as numbers, [tile_rows][score_stride],
  P* tile_pairs = nullptr;                         // and of dS with its slots in pairs
  T* raw = nullptr;                                // [tile_rows][score_stride], where the terms of the scores need them
  P *queries = nullptr, *d_out = nullptr;          // not of pairs: one tile [dim][tile_rows]
  key_range* ranges = nullptr;                     // [max_rows]: slots a row sees of this block of keys

  static backward_scratch layout(arena& memory, index dim, index dim_v, bool with_raw) {
    constexpr index paired = numbers_of<P> > 1, tile = tile_rows * score_stride;
    return {.weights = memory.allocate<P>(operands<P>(max_rows) * score_stride),
            .d_scores = memory.allocate<P>(operands<P>(max_rows) * score_stride),
            .tile_weights = memory.allocate<T>(paired * tile),
            .tile_d = memory.allocate<T>(paired * tile),
            .tile_pairs = memory.allocate<P>(paired * operands<P>(tile)),
            .raw = with_raw ? memory.allocate<T>(tile) : nullptr,
            .queries = memory.allocate<P>((1 - paired) * tile_rows * dim),
            .d_out = memory.allocate<P>((1 - paired) * tile_rows * dim_v),
            .ranges = memory.allocate<key_range>(max_rows)};
  }
};

/// Step 5 for `keys` <= M keys: sums[m] += sum over rows r < depth of weights[r][m] times row r of the panels; of pairs
/// of rows depth counts those.
template <class P, int M>
void transposed_output(const P* weights, const P* panels, index depth, index keys, index cols, sum_type<P>* sums,
                       index stride) {
  using T = sum_type<P>;
  const left_operand<P, 1, score_stride> left{weights};
  panel_products<P, M>(left, panels, operands<P>(max_rows) * panel_width<T>, 0, cols, depth,
                       [&](auto m, index col, const auto& x) {
                         // Whole vectors of keys are whole steps of tiles, except where a vector is shorter than a
                         // step.
                         if (width<T> % tile_step != 0 && m >= keys) return;
                         T* const to = sums + m * stride + col;
                         store<T>(to, add(load<T>(to), x));
                       });
}

/// Step 5 where a query or gradient is not finite: weight by weight, skipping those that are 0. Same sums, to the last
/// bit.
template <class P>
[[gnu::noinline]] void transposed_output_checked(const P* weights, const P* panels, index depth, index keys, index cols,
                                                 sum_type<P>* sums, index stride) {
  using T = sum_type<P>;
  if constexpr (numbers_of<P> > 1) {
    const left_operand<P, 1, score_stride> left{weights};
    for (index col = 0; col < cols; col += panel_width<T>)
      seen_product<seen_depth<P>>(left, keys, panels + col * operands<P>(max_rows), col + width<T> < cols ? 2 : 1, depth,
                               seen_by_weight(left), [&](index m, index half, const auto& x) {
                     T* const to = sums + m * stride + col + half * width<T>;
                     store<T>(to, add(load<T>(to), x));
                   });
  } else {
    for (index m = 0; m < keys; ++m)
      for (index col = 0; col < cols; col += width<T>) {
        packet<T> x = zero<T>();
        for (index r = 0; r < depth; ++r) {
          const P weight = weights[r * score_stride + m];
          if (weight == P(0)) continue;
          const P* const row = panels + col / panel_width<T> * panel_width<T> * max_rows + r * panel_width<T>;
          x = multiply_add<P>(broadcast<P>(weight), load<P>(row + col % panel_width<T>), x);
        }
        T* const to = sums + m * stride + col;
        store<T>(to, add(load<T>(to), x));
      }
  }
}

/// Steps 1 to 3, second half, for one row of a tile: weights from scores, dS from d_out V^T.
template <class P>
ATTN_INLINE void row_gradients(sum_type<P>* weight, sum_type<P>* d, index count, sum_type<P> row_lse,
                               sum_type<P> row_delta) {
  using T = sum_type<P>;
  const packet<T> lowest = broadcast<T>(std::numeric_limits<T>::lowest());
  const packet<T> lse = broadcast<T>(row_lse), delta = broadcast<T>(row_delta);
  const auto power = [](const packet<T>& x) {
    if constexpr (numbers_of<P> > 1)
      return exp2_rounded(x);
    else
      return exp2_weight<T>(x);
  };
  for (index n = 0; n < count; n += width<T>) {
    const packet<T> x = load<T>(weight + n);  // -infinity where the key is not seen, also by a row whose lse is NaN
    const packet<T> w = if_less(x, lowest, zero<T>(), power(sub(x, lse)));
    store<T>(weight + n, w);
    // 0 where the weight is 0, whatever the value; a weight of NaN stays NaN.
    store<T>(d + n, if_less(zero<T>(), w, mul(w, sub(load<T>(d + n), delta)), w));
  }
}

/// Steps 1 to 4 for one tile. Its slots lie at `column` in the rows of weights and dS. Returns false where a mask hides
/// the whole tile: these are then 0.
template <class P, class Score, class Terms>
[[gnu::noinline]] bool backward_tile(const backward_rows<P>& rows, const backward_keys<P>& k, const tile& t,
                                     const index_map& positions, const score_terms<sum_type<P>, Score>& terms,
                                     const backward_scratch<P>& s, index column, sum_type<P>* dq, index dq_stride,
                                     Terms& back) {
  using T = sum_type<P>;
  constexpr index step = numbers_of<P>;
  P *const weights = s.weights + t.row / step * score_stride + column,
          *const d_scores = s.d_scores + t.row / step * score_stride + column;
  const P *queries = s.queries, *d_out = s.d_out;
  T *p = s.tile_weights, *ds = s.tile_d, factor = T(1);
  if constexpr (step == 1) {
    p = weights, ds = d_scores;
    tile_of_panels(rows.queries, t.row, t.rows, rows.dim, terms.query_factor(), s.queries);
    tile_of_panels(rows.d_out, t.row, t.rows, rows.dim_v, T(1), s.d_out);
  } else {
    queries = rows.query_tiles + t.row * row_operands<P>(rows.dim);
    d_out = rows.d_out_tiles + t.row * row_operands<P>(rows.dim_v);
    factor = terms.query_factor();
  }
  if (!masked_scores(queries, s.ranges, positions, k.keys, t, terms, p, s.raw, factor)) {
    for (index m = 0; m < operands<P>(t.rows); ++m) {
      std::fill_n(weights + m * score_stride, t.count, P{});
      std::fill_n(d_scores + m * score_stride, t.count, P{});
    }
    return false;
  }
  with_tile_height(t.rows, [&](auto M) { tile_scores<P, M.value>(d_out, k.values, t.first, t.count, ds); });
  for (index m = 0; m < t.rows; ++m) {
    T* const d = ds + m * score_stride;
    row_gradients<P>(p + m * score_stride, d, t.count, rows.lse[t.row + m], rows.delta[t.row + m]);
    if (back.any())
      back(s.raw ? s.raw + m * score_stride : nullptr, d, t.count, positions[t.row + m], k.keys.positions, t.first);
  }
  const P* by_slots = d_scores;
  if constexpr (step > 1) {
    rows_to_pairs(p, t.rows, t.count, score_stride, weights);
    rows_to_pairs(ds, t.rows, t.count, score_stride, d_scores);
    for (index m = 0; dq && m < t.rows; ++m)
      lanes_to_pairs(ds + m * score_stride, t.count, s.tile_pairs + m * score_stride / 2);
    by_slots = s.tile_pairs;
  }
  if (!dq) return true;
  alignas(64) T ones[round_up(tile_rows, width<T>)];
  std::fill_n(ones, round_up(tile_rows, width<T>), T(1));
  const index low = t.low / step * step, high = round_up(t.high, step);
  const P* const seen = by_slots + (low - t.first) / step;
  T* const to = dq + t.row * dq_stride;
  if (k.keys.all_finite(low, high)) [[likely]]
    with_tile_height(t.rows,
                     [&](auto M) { add_output<P, M.value>(seen, ones, k.keys, low, high, to, dq_stride); });
  else
    careful_output(seen, ones, k.keys, low, high, t.rows, to, dq_stride);
  return true;
}

/// One block of rows with slots [from, to) of the keys, to - from <= backward_key_block, from a multiple of the panel
/// width. `ranges` are the slots its rows see, `positions` their queries; dq [rows][dq_stride], if given, takes the
/// sums of dS' K; `back` takes dS to dS'.
template <class P, class Score, class Terms>
void backward_block(const backward_rows<P>& rows, index count, const key_range* ranges, const index_map& positions,
                    const backward_keys<P>& k, index from, index to, const score_terms<sum_type<P>, Score>& terms,
                    const backward_scratch<P>& s, sum_type<P>* dq, index dq_stride, Terms& back) {
  using T = sum_type<P>;
  constexpr index step = numbers_of<P>;
  index low = to, high = from, all_low = from, all_high = to;
  for (index r = 0; r < count; ++r) {
    s.ranges[r] = {std::clamp(ranges[r].begin, from, to), std::clamp(ranges[r].end, from, to)};
    all_low = std::max(all_low, s.ranges[r].begin);
    all_high = std::min(all_high, s.ranges[r].end);
    if (s.ranges[r].begin >= s.ranges[r].end) continue;
    low = std::min(low, s.ranges[r].begin);
    high = std::max(high, s.ranges[r].end);
  }
  if (low >= high) return;
  const index base = low / width<T> * width<T>, columns = round_up(high, width<T>) - base;
  const bool all_seen = all_low <= low && all_high >= high;  // by every row
  for (index r = 0; r < operands<P>(count) && !all_seen; ++r) {  // entries that no tile writes are 0
    std::fill_n(s.weights + r * score_stride, columns, P{});
    std::fill_n(s.d_scores + r * score_stride, columns, P{});
  }
  bool seen[max_rows / tile_rows + 1] = {};  // whether a tile of these rows has keys that the mask does not hide
  visit_tiles<T>(s.ranges, count, [&](const tile& t) {
    seen[t.row / tile_rows] |=
        backward_tile(rows, k, t, positions, terms, s, t.first - base, dq, dq_stride, back);
  });

  const index stride_k = k.stride(rows.dim), stride_v = k.stride(rows.dim_v);
  for (index j = base; j < high; j += tile_rows) {
    const index keys = std::min<index>(tile_rows, base + columns - j);
    index begin = 0, end = count;  // rows that see any of them
    if (!all_seen || terms.mask) {
      const auto blind = [&](index r) {
        return s.ranges[r].begin >= j + keys || s.ranges[r].end <= j || !seen[r / tile_rows];
      };
      while (begin < end && blind(begin)) ++begin;
      while (begin < end && blind(end - 1)) --end;
    }
    if (begin >= end) continue;
    begin /= step;
    const index offset = begin * score_stride + j - base, depth = operands<P>(end) - begin;
    const P *const p = s.weights + offset, *const ds = s.d_scores + offset;
    const P *const queries = rows.queries + begin * panel_width<T>,
                   *const d_out = rows.d_out + begin * panel_width<T>;
    T *const d_values = k.d_values ? k.d_values + j * stride_v : nullptr,
             *const d_keys = k.d_keys ? k.d_keys + j * stride_k : nullptr;
    if (*rows.finite) [[likely]] {
      with_tile_height(keys, [&](auto M) {
        if (d_values) transposed_output<P, M.value>(p, d_out, depth, keys, rows.dim_v, d_values, stride_v);
        if (d_keys) transposed_output<P, M.value>(ds, queries, depth, keys, rows.dim, d_keys, stride_k);
      });
    } else {
      if (d_values) transposed_output_checked(p, d_out, depth, keys, rows.dim_v, d_values, stride_v);
      if (d_keys) transposed_output_checked(ds, queries, depth, keys, rows.dim, d_keys, stride_k);
    }
  }
}

/// One block of rows with all slots that its ranges name, as attend() does.
template <class P, class Score, class Terms>
void differentiate(const backward_rows<P>& rows, index count, const key_range* ranges, const index_map& positions,
                   const backward_keys<P>& k, const score_terms<sum_type<P>, Score>& terms,
                   const backward_scratch<P>& s, sum_type<P>* dq, index dq_stride, Terms& back) {
  index begin = std::numeric_limits<index>::max(), end = 0;
  for (index r = 0; r < count; ++r) {
    if (ranges[r].begin >= ranges[r].end) continue;
    begin = std::min(begin, ranges[r].begin);
    end = std::max(end, ranges[r].end);
  }
  for (index from = begin / panel_width<P> * panel_width<P>; from < end; from += backward_key_block)
    backward_block(rows, count, ranges, positions, k, from, std::min(from + backward_key_block, end), terms, s, dq,
                   dq_stride, back);
}

}  // namespace attn::inline ATTN_ISA::detail
