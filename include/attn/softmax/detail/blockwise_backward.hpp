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
// P and dS of a block (2 x 96 KiB in float) and the packed keys stay in the second-level cache: on Zen 5, 4096 tokens
// in float, full_softmax_backward takes 2.5 to 2.6 times its forward call with blocks of 192, 256 and 384 keys alike. A
// second pass for dQ, by blocks of queries, would take seven products where this takes five. A key whose weight is
// exactly 0 contributes to no gradient, even if its value, key, query or gradient is NaN.
//
// With bf16 pairs (P, see blockwise.hpp), weights and dS are rounded for step 4, as pairs of slots, and for step 5, as
// pairs of rows.
#pragma once

#include <attn/softmax/detail/position_query_gradients.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Step 5 for `keys` <= tile_rows keys: sums[m] += sum over rows r < depth of weights[r][m] times row r of the panels;
/// of pairs of rows depth counts those.
template <class P>
void transposed_output(const P* weights, const P* panels, idx_t depth, idx_t keys, idx_t cols, sum_type<P>* sums,
                       idx_t stride) {
  using T = sum_type<P>;
  const left_operand<P, 1, score_stride> left{weights};
  products_of_rows<P>(keys, left, panels, operands<P>(max_rows) * panel_width<T>, 0, cols, depth,
                      [&](auto m, idx_t col, const auto& x) {
                        // Whole vectors of keys are whole steps of tiles, except where a vector is shorter than a step.
                        if (width<T> % tile_step != 0 && m >= keys) return;
                        T* const to = sums + m * stride + col;
                        store<T>(to, add(load<T>(to), x));
                      });
}

/// Step 5 where a query or gradient is not finite: weight by weight, skipping those that are 0. Same sums, to the last
/// bit.
template <class P>
[[gnu::noinline]] void transposed_output_checked(const P* weights, const P* panels, idx_t depth, idx_t keys, idx_t cols,
                                                 sum_type<P>* sums, idx_t stride) {
  using T = sum_type<P>;
  if constexpr (numbers_of<P> > 1) {
    const left_operand<P, 1, score_stride> left{weights};
    for (idx_t col = 0; col < cols; col += panel_width<T>)
      seen_product<seen_depth<P>>(left, keys, panels + col * operands<P>(max_rows), col + width<T> < cols ? 2 : 1, depth,
                               seen_by_weight(left), [&](idx_t m, idx_t half, const auto& x) {
                     T* const to = sums + m * stride + col + half * width<T>;
                     store<T>(to, add(load<T>(to), x));
                   });
  } else {
    for (idx_t m = 0; m < keys; ++m)
      for (idx_t col = 0; col < cols; col += width<T>) {
        packet<T> x = zero<T>();
        for (idx_t r = 0; r < depth; ++r) {
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
ATTN_INLINE void row_gradients(sum_type<P>* weight, sum_type<P>* d, idx_t count, sum_type<P> row_maximum,
                               sum_type<P> row_log_sum, sum_type<P> row_delta) {
  using T = sum_type<P>;
  const packet<T> lowest = broadcast<T>(std::numeric_limits<T>::lowest());
  const packet<T> maximum = broadcast<T>(row_maximum), log_sum = broadcast<T>(row_log_sum);
  const packet<T> delta = broadcast<T>(row_delta);
  const auto power = [](const packet<T>& x) {
    if constexpr (numbers_of<P> > 1)
      return exp2_rounded(x);
    else
      return exp2_weight<T>(x);
  };
  for (idx_t n = 0; n < count; n += width<T>) {
    const packet<T> x = load<T>(weight + n);  // -infinity where the key is not seen, also by a row whose lse is NaN
    const packet<T> w = if_less(x, lowest, zero<T>(), power(sub(sub(x, maximum), log_sum)));
    store<T>(weight + n, w);
    // 0 where the weight is 0, whatever the value; a weight of NaN stays NaN.
    store<T>(d + n, if_less(zero<T>(), w, mul(w, sub(load<T>(d + n), delta)), w));
  }
}

/// Which keys of a tile are kept, by its scores and the maxima of its rows: what the forward pass has left out lies
/// below these too. (By lse, rows of many small weights would keep none.)
template <class P, class T>
kept_blocks kept_of_tile(const tile& t, const T* s, const backward_rows<P>& rows, T limit) {
  T least[tile_rows];
  for (idx_t m = 0; m < t.rows; ++m) least[m] = rows.maximum[t.row + m] - limit;
  return kept_blocks::of(s, score_stride, t.rows, t.count, T(1), least);
}

/// Steps 1 to 4 for one tile. Its slots lie at `column` in the rows of weights and dS. Returns which keys it has kept:
/// none where a mask hides the whole tile. Those of the others are 0.
template <class P, class Score, class Terms>
[[gnu::noinline]] kept_blocks backward_tile(const backward_rows<P>& rows, const backward_keys<P>& k, const tile& t,
                                            const index_map& positions, const score_terms<sum_type<P>, Score>& terms,
                                            const backward_scratch<P>& s, idx_t column, sum_type<P>* dq,
                                            idx_t dq_stride, Terms& back) {
  using T = sum_type<P>;
  constexpr idx_t step = numbers_of<P>;
  P *const weights = s.weights + t.row / step * score_stride + column,
          *const d_scores = s.d_scores + t.row / step * score_stride + column;
  const P* const queries = rows.query_tiles + t.row * row_chunk_operands<P>(rows.dim);
  const P* const d_out = rows.d_out_tiles + t.row * row_chunk_operands<P>(rows.dim_v);
  T *p = s.tile_weights, *ds = s.tile_d;
  if constexpr (step == 1) p = weights, ds = d_scores;
  rows.prefetch_tile(t.row + tile_rows, dq, dq_stride);
  if (rows.relative) tile_of_panels(rows.relative, t.row, t.rows, rows.dim, terms.query_factor(), s.relative);
  kept_blocks kept;
  if (!masked_scores(queries, rows.relative ? s.relative : nullptr, s.ranges, positions, k.keys, t, terms, p, s.raw,
                     terms.query_factor()))
    kept.bits = 0;
  else if (terms.skip.leaves_out())
    kept = kept_of_tile(t, p, rows, terms.skip.limit);
  if (kept.none(t.count)) {
    for (idx_t m = 0; m < operands<P>(t.rows); ++m) {
      std::fill_n(weights + m * score_stride, t.count, P{});
      std::fill_n(d_scores + m * score_stride, t.count, P{});
    }
    return kept;
  }
  kept.for_each_run(t.count, [&](idx_t begin, idx_t end, bool is_kept) {
    if (is_kept)
      return tile_scores(d_out, t.rows, k.values, t.first + begin, end - begin, ds + begin);
    for (idx_t m = 0; m < t.rows; ++m)
      for (T* x : {p, ds}) std::fill(x + m * score_stride + begin, x + m * score_stride + end, T(0));
  });
  for (idx_t m = 0; m < t.rows; ++m) {
    T *const d = ds + m * score_stride, *const weight = p + m * score_stride;
    const key_range seen = terms.dropout ? s.ranges[t.row + m] : key_range{};
    const auto drop = [&](T* x) {  // of the keys the row sees; the other weights are 0
      const idx_t begin = (std::max)(seen.begin, t.first), end = (std::min)(seen.end, t.first + t.count);
      if (begin < end) terms.drop(x + begin - t.first, end - begin, positions[t.row + m], k.keys.positions, begin);
    };
    drop(d);
    if constexpr (makes_weights<Score>) {
      const T sum = terms.score->differentiate(weight, d, t.count, rows.maximum[t.row + m]);
      if (back.rows) back.rows[positions[t.row + m]] += static_cast<double>(sum);
    } else {
      kept.for_each_run(t.count, [&](idx_t begin, idx_t end, bool is_kept) {
        if (is_kept)
          row_gradients<P>(weight + begin, d + begin, end - begin, rows.maximum[t.row + m], rows.log_sum[t.row + m],
                           rows.delta[t.row + m]);
      });
    }
    drop(weight);
    if (back.any())
      back(s.raw ? s.raw + m * score_stride : nullptr, d, t.count, positions[t.row + m], k.keys.positions, t.first);
  }
  if (back.by_distance)
    terms.by_distance.add_gradients(ds, rows.relative, *rows.finite, positions.from(t.row), terms.query_shift,
                                    terms.head, k.keys.positions, t, back.by_distance);
  const P* by_slots = d_scores;
  if constexpr (step > 1) {
    rows_to_pairs(p, t.rows, t.count, score_stride, weights);
    rows_to_pairs(ds, t.rows, t.count, score_stride, d_scores);
    for (idx_t m = 0; dq && m < t.rows; ++m)
      lanes_to_pairs(ds + m * score_stride, t.count, s.tile_pairs + m * score_stride / 2);
    by_slots = s.tile_pairs;
  }
  if (!dq) return kept;
  alignas(64) T ones[round_up(tile_rows, width<T>)];
  std::fill_n(ones, round_up(tile_rows, width<T>), T(1));
  const idx_t unit = rows_for_matrix_unit<P> && t.fixed ? panel_width<T> : step;
  T* const to = dq + t.row * dq_stride;
  kept.for_each_run(t.count, [&](idx_t begin, idx_t end, bool is_kept) {
    const idx_t low = (std::max)(t.low, t.first + begin) / unit * unit,
                high = round_up((std::min)(t.high, t.first + end), unit);
    if (!is_kept || low >= high) return;
    const P* const seen = by_slots + (low - t.first) / step;
    if (k.keys.all_finite(low, high)) [[likely]]
      add_output(seen, ones, k.keys, low, high, t.rows, to, dq_stride);
    else
      careful_output(seen, ones, k.keys, low, high, t.rows, to, dq_stride);
  });
  return kept;
}

/// One block of rows with slots [from, to) of the keys, to - from <= backward_key_block, from a multiple of the panel
/// width. `ranges` are the slots its rows see, `positions` their queries; dq [rows][dq_stride], if given, takes the
/// sums of dS' K; `back` takes dS to dS'.
template <class P, class Score, class Terms>
void backward_block(const backward_rows<P>& rows, idx_t count, const key_range* ranges, const index_map& positions,
                    const backward_keys<P>& k, idx_t from, idx_t to, const score_terms<sum_type<P>, Score>& terms,
                    const backward_scratch<P>& s, sum_type<P>* dq, idx_t dq_stride, Terms& back) {
  using T = sum_type<P>;
  constexpr idx_t step = numbers_of<P>;
  idx_t low = to, high = from, all_low = from, all_high = to;
  for (idx_t r = 0; r < count; ++r) {
    s.ranges[r] = {std::clamp(ranges[r].begin, from, to), std::clamp(ranges[r].end, from, to)};
    all_low = (std::max)(all_low, s.ranges[r].begin);
    all_high = (std::min)(all_high, s.ranges[r].end);
    if (s.ranges[r].begin >= s.ranges[r].end) continue;
    low = (std::min)(low, s.ranges[r].begin);
    high = (std::max)(high, s.ranges[r].end);
  }
  if (low >= high) return;
  const idx_t unit = unit_of_tiles<P>(s.fixed);
  const idx_t base = low / unit * unit, columns = round_up(high, unit) - base;
  const bool all_seen = all_low <= low && all_high >= high;  // by every row
  for (idx_t r = 0; r < operands<P>(count) && !all_seen; ++r) {  // entries that no tile writes are 0
    std::fill_n(s.weights + r * score_stride, columns, P{});
    std::fill_n(s.d_scores + r * score_stride, columns, P{});
  }
  struct {
    kept_blocks kept{0};  // that a mask does not hide, and that are not left out
    idx_t first = 0;      // the slot where they begin

    bool any(idx_t begin, idx_t end) const {
      return first < end && kept.any((std::max)(begin - first, idx_t(0)), end - first);
    }
  } seen[max_rows / tile_rows + 1];  // by tiles of rows
  for (idx_t row = 0; row < count; row += tile_rows)
    if (const tile t = tile_of(s.ranges, row, count, {from, to}, s.fixed, unit); t.low < t.high)
      seen[row / tile_rows] = {backward_tile(rows, k, t, positions, terms, s, t.first - base, dq, dq_stride, back),
                               t.first};

  const idx_t stride_k = k.stride(rows.dim), stride_v = k.stride(rows.dim_v);
  const bool leaves_out = terms.skip.leaves_out();
  for (idx_t j = base; j < high; j += tile_rows) {
    const idx_t keys = std::min<idx_t>(tile_rows, base + columns - j);
    idx_t first = 0, last = count;  // rows that see any of them
    const auto blind = [&](idx_t r) {
      return s.ranges[r].begin >= j + keys || s.ranges[r].end <= j || !seen[r / tile_rows].any(j, j + keys);
    };
    if (!all_seen || terms.mask || leaves_out) {
      while (first < last && blind(first)) ++first;
      while (first < last && blind(last - 1)) --last;
    }
    const auto leave_out = [&](idx_t r) { return leaves_out && !seen[r / tile_rows].any(j, j + keys); };
    for (idx_t next = first; first < last; first = next) {  // tiles of rows that leave them out divide these
      const bool is_left_out = leave_out(first);
      do next = leaves_out ? (std::min)(last, round_up(next + 1, tile_rows)) : last;
      while (next < last && leave_out(next) == is_left_out);
      if (is_left_out) continue;
      const idx_t begin = first / step, depth = operands<P>(next) - begin;
      const idx_t offset = begin * score_stride + j - base;
      const P *const p = s.weights + offset, *const ds = s.d_scores + offset;
      const P *const queries = rows.queries + begin * panel_width<T>,
                     *const d_out = rows.d_out + begin * panel_width<T>;
      const auto add_to = [&](const P* weights, const P* panels, idx_t size, T* all, T* errors, idx_t stride) {
        if (!all) return;
        T* const sum = errors ? s.part : all + j * stride;
        if (errors) std::fill_n(sum, tile_rows * stride, T(0));
        if (*rows.finite) [[likely]]
          transposed_output(weights, panels, depth, keys, size, sum, stride);
        else
          transposed_output_checked(weights, panels, depth, keys, size, sum, stride);
        if (errors) move_compensated(sum, keys * stride, T(1), all + j * stride, errors + j * stride);
      };
      add_to(p, d_out, rows.dim_v, k.d_values, k.value_errors, stride_v);
      add_to(ds, queries, rows.dim, k.d_keys, k.key_errors, stride_k);
    }
  }
  if (terms.by_position && (k.d_keys || back.d_positions))
    add_position_gradients(count, base, high - base, positions, k, terms, s, back.d_positions);
}

/// One block of rows with all slots that its ranges name, as attend() does.
template <class P, class Score, class Terms>
void differentiate(const backward_rows<P>& rows, idx_t count, const key_range* ranges, const index_map& positions,
                   const backward_keys<P>& k, const score_terms<sum_type<P>, Score>& terms,
                   const backward_scratch<P>& s, sum_type<P>* dq, idx_t dq_stride, Terms& back) {
  idx_t begin = (std::numeric_limits<idx_t>::max)(), end = 0;
  for (idx_t r = 0; r < count; ++r) {
    if (ranges[r].begin >= ranges[r].end) continue;
    begin = (std::min)(begin, ranges[r].begin);
    end = (std::max)(end, ranges[r].end);
  }
  using T = sum_type<P>;
  const idx_t size = dq ? round_up(count, tile_rows) * dq_stride : 0;
  const idx_t first = begin / (s.fixed ? backward_key_block : panel_width<P>) *
                      (s.fixed ? backward_key_block : panel_width<P>);
  idx_t taken = s.fixed ? first % long_segment : 0;  // keys since the sums were moved
  bool moved = false;
  const auto move = [&] {
    if (!std::exchange(moved, true))
      for (T* x : {s.long_dq, s.long_errors}) std::fill_n(x, size, T(0));
    move_compensated(dq, size, T(1), s.long_dq, s.long_errors);
  };
  for (idx_t from = first; from < end; from += backward_key_block) {
    if (taken >= long_segment) move(), taken = 0;
    taken += backward_key_block;
    backward_block(rows, count, ranges, positions, k, from, (std::min)(from + backward_key_block, end), terms, s, dq,
                   dq_stride, back);
  }
  if (!moved) return;
  move();
  settle_compensated(s.long_dq, s.long_errors, size, dq);
}

}}}  // namespace attn::ATTN_ISA::detail
