// attn: the one blockwise kernel of exact softmax attention.
//
// A row_block holds up to max_rows queries of one head and the state of their online softmax: the running maximum m,
// the sum of weights l and the unnormalised output o (Rabe & Staats 2021, Dao 2022). attend() takes it through packed
// keys, any number of times, in any order of disjoint key sets:
//
//   attend: for every block of keys, for every tile of rows that sees any of them,
//   attend_tile:
//     1. scores   S = Q K^T           tile_product, rows x panels (tile_scores.hpp)
//     2. terms    softcap, bias, ...  only where asked for; keys outside a row's range become -infinity
//     3. softmax  m, P = 2^(S - m), l
//     4. output   o = o 2^(m_old - m) + P V   (tile_output.hpp)
//
// A tile's scores (18 KiB) never leave the first-level cache; a block of keys and values is reused from the
// second-level cache by all tiles. Which keys a row sees is a range of slots per row: the kernel knows no pattern.
// Panels that no row of a tile sees are not read. A key whose weight is exactly 0 contributes nothing, even if its
// value is NaN.
//
// P is the operand type of products (bf16_pair.hpp), T = sum_type<P> that of everything else. With bf16 pairs the
// caller's bf16 queries, keys and values are multiplied as they are, so that scores lose nothing, and the scale is
// applied after the product; weights are rounded for the product with the values, not in their sum.
#pragma once

#include <attn/softmax/detail/kept_weights.hpp>
#include <attn/softmax/detail/tile_scores.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Up to this many queries per head are attended with the keys in place (streaming.hpp); for more, packing them pays.
inline constexpr idx_t queries_in_place = 4;

template <class P>
using long_row_sums = long_sums<sum_type<P>, width<sum_type<P>>>;

template <class P>
struct row_block {
  using T = sum_type<P>;

  P* queries = nullptr;         // per tile in chunks
  T* scores = nullptr;          // [tile_rows][score_stride]
  P* weights = nullptr;         // the same of pairs, twice; otherwise they take the place of the scores
  online_softmax<T, width<T>> state;
  key_range* ranges = nullptr;  // slots a row sees
  idx_t dim = 0, rows = 0;
  T factor = T(1);        // of scores, where it was not applied to the queries
  index_map positions{};  // the query of each row
  long_softmax<T, width<T>> total{};  // of sums()
  T* relative = nullptr;              // the queries of relative keys, per tile [dim][tile_rows]
  bool fixed = false;  // whether tiles have fixed places among the slots, whatever rows see (execution::set_invariant)

  /// For up to `most` rows, a multiple of tile_rows.
  static row_block layout(arena& memory, idx_t dim, idx_t dim_v, bool with_relative = false, idx_t most = max_rows) {
    constexpr bool paired = numbers_of<P> > 1;
    return {.queries = memory.allocate<P>(most * row_chunk_operands<P>(dim)),
            .scores = memory.allocate<T>(tile_rows * score_stride),
            .weights = memory.allocate<P>(paired ? 2 * tile_rows * operands<P>(score_stride) : 0),
            .state = online_softmax<T, width<T>>::layout(memory, most, dim_v, panel_width<T>),
            .ranges = memory.allocate<key_range>(most),
            .dim = dim,
            .total = long_softmax<T, width<T>>::layout(memory, most, dim_v, panel_width<T>),
            .relative = with_relative ? memory.allocate<T>(most * row_operands<T>(dim)) : nullptr};
  }

  /// Begins with `count` queries, rows which[...] of q, that have seen no key yet.
  template <class S>
  void begin(const matrix_view<const S>& q, const index_map& which, idx_t count, T scale) {
    begin([&](idx_t r) { return q.row(which[r]); }, q.col_stride, which, count, scale);
  }
  /// The same with row(r) as query of row r.
  template <class Row>
  void begin(const Row& row, idx_t col_stride, const index_map& which, idx_t count, T scale) {
    rows = count;
    positions = which;
    if constexpr (numbers_of<P> > 1) factor = std::exchange(scale, T(1));
    for (idx_t r = 0; r < rows; r += tile_rows)
      pack_row_chunks<P>([&](idx_t i) { return row(r + i); }, std::min<idx_t>(tile_rows, rows - r), dim, col_stride,
                         scale, queries_from(r));
    const idx_t padded = round_up(rows, tile_rows);
    state.clear(padded);
    std::fill_n(ranges, padded, key_range{});
  }

  /// The queries of relative keys, of the same rows.
  template <class S>
  void begin_relative(const matrix_view<const S>& q, T scale) const {
    for (idx_t r = 0; r < rows; r += tile_rows)
      pack_rows<T>([&](idx_t i) { return q.row(positions[r + i]); }, std::min<idx_t>(tile_rows, rows - r), dim,
                   q.col_stride, scale, relative + r * row_operands<T>(dim));
  }

  /// For rows that see more than long_segment keys; `begun`, see long_sums.
  long_row_sums<P> sums(bool begun = false) const { return {state, total, rows, long_segment, begun}; }
  P* second_weights() const { return weights + tile_rows * operands<P>(score_stride); }
  /// The packed queries of the tile that begins with this row.
  P* queries_from(idx_t row) const { return queries + row * row_chunk_operands<P>(dim); }
  const T* relative_from(idx_t row) const { return relative ? relative + row * row_operands<T>(dim) : nullptr; }
};

/// Row r of a tile of long rows: `sum` are the sums of its weights, `largest` the largest of them. Weights that would
/// fill the sums to which smaller ones are added are moved to the total, and become 0: those of more than a quarter of
/// the tile and a sixteenth of the row so far. Returns the sums of the others. (full_softmax, 65536 keys: 1.00 to 1.03
/// of the time.)
template <class T, class Keys, class Score>
[[gnu::noinline]] packet<T> move_large_weights(const row_block<T>& block, const Keys& keys, const tile& t,
                                               const score_terms<T, Score>& terms, idx_t r, T* row, T rescale,
                                               T largest, packet<T> sum) {
  const T own = sum_lanes(sum), maximum = block.state.maximum[r];
  const T limit = (std::max)(own / 4, (own + block.state.row_sum(r) * rescale + block.total.row_sum(r, maximum)) / 16);
  if (!(largest > limit)) return sum;
  sum = zero<T>();
  for (idx_t n = 0; n < t.count; n += width<T>) {
    if (max_lanes(load<T>(row + n)) > limit)
      for (idx_t lane = n; lane < n + width<T>; ++lane)
        if (row[lane] > limit) {
          const T weight = std::exchange(row[lane], T(0));
          T kept = weight;
          if (terms.dropout) terms.drop(&kept, 1, block.positions[r], keys.positions, t.first + lane);
          block.total.add_key(r, maximum, weight, kept, keys.value_row(t.first + lane),
                              keys.value_stride());
        }
    sum = add(sum, load<T>(row + n));
  }
  return sum;
}

/// Drops weights of row m of a tile, which are in the place of its scores, then stores them as operands.
template <class P, class Score>
[[gnu::noinline]] void drop_row(const row_block<P>& block, const packed_keys<P>& keys, const tile& t,
                                const score_terms<sum_type<P>, Score>& terms, idx_t m, P* weights) {
  sum_type<P>* const row = block.scores + m * score_stride;
  const key_range seen = block.ranges[t.row + m];
  const idx_t begin = std::clamp(seen.begin - t.first, idx_t(0), t.count);
  const idx_t end = std::clamp(seen.end - t.first, begin, t.count);
  terms.drop(row + begin, end - begin, block.positions[t.row + m], keys.positions, t.first + begin);
  to_operands(row, t.count, weights);
}

/// Computes the weights of a tile; its output is left to `last`. Large weights of long rows, whose slots begin before
/// `long_from`, go to their total. Returns which keys it has kept.
template <class P, class Keys, class Score>
[[gnu::noinline]] kept_blocks attend_tile(const row_block<P>& block, const Keys& keys, const tile& t,
                                          const score_terms<sum_type<P>, Score>& terms, tile_output<P, Keys>& last,
                                          idx_t long_from) {
  using T = sum_type<P>;
  const bool long_rows = long_from > 0;
  const auto& state = block.state;
  T *const s = block.scores, factor = 1;
  if (!masked_scores(block.queries_from(t.row), block.relative_from(t.row), block.ranges, block.positions, keys, t,
                     terms, s, static_cast<T*>(nullptr), block.factor, &factor))
    return {};

  P* weights = block.weights;
  if constexpr (numbers_of<P> == 1)
    weights = s;
  else if (last.weights_in_use() && last.weights_in_use() < block.second_weights())
    weights = block.second_weights();
  if constexpr (makes_weights<Score>) {
    alignas(64) T ones[round_up(tile_rows, width<T>)];
    std::fill_n(ones, std::size(ones), T(1));
    for (idx_t m = 0; m < t.rows; ++m) {
      terms.score->weigh(s + m * score_stride, t.count, factor);
      to_operands(s + m * score_stride, t.count, weights + m * operands<P>(score_stride));
      state.maximum[t.row + m] = 0, state.sum[(t.row + m) * width<T>] = 1;
      last.resume();
    }
    last.finish();
    last.begin(t, weights, ones);
    if constexpr (!rows_for_matrix_unit<P>) last.finish();
    return {};
  }
  alignas(64) T reference[tile_rows], rescale[round_up(tile_rows, width<T>)] = {}, largest[std::size(rescale)] = {};
  for (idx_t m = 0; m < t.rows; ++m)
    rescale[m] = row_maximum(s + m * score_stride, t.count, factor, state.maximum[t.row + m], reference[m], largest[m]);
  kept_blocks kept;
  bool all_kept = true;
  if (terms.skip) {
    kept = kept_of_tile(t, s, factor, state.maximum + t.row, terms.skip.limit);
    if (kept.none(t.count)) return kept;  // no maximum was raised
    all_kept = kept.all(t.count);
  }
  for (idx_t m = 0; m < t.rows; m += width<T>) store<T>(rescale + m, exp2_weight<T>(load<T>(rescale + m)));
  if (numbers_of<P> == 1 && long_rows)
    for (idx_t m = 0; m < t.rows; m += width<T>) store<T>(largest + m, exp2_weight<T>(load<T>(largest + m)));
  for (idx_t m = 0; m < t.rows; ++m) {
    T* const total = state.sum + (t.row + m) * width<T>;
    packet<T> sum = !all_kept       ? kept_weights(kept, s + m * score_stride, t.count, factor, reference[m],
                                                   weights + m * operands<P>(score_stride))
                    : terms.dropout ? row_weights(s + m * score_stride, t.count, factor, reference[m])
                                    : row_weights(s + m * score_stride, t.count, factor, reference[m],
                                                  weights + m * operands<P>(score_stride));
    if constexpr (numbers_of<P> == 1)
      if (block.ranges[t.row + m].begin < long_from)
        if (largest[m] > (std::max)(sum_lanes(sum) / 4, T(1) / 16)) [[unlikely]]  // the row has a weight of 1
          sum = move_large_weights(block, keys, t, terms, t.row + m, s + m * score_stride, rescale[m], largest[m], sum);
    if (terms.dropout) drop_row(block, keys, t, terms, m, weights + m * operands<P>(score_stride));
    store<T>(total, fma(load<T>(total), broadcast<T>(rescale[m]), sum));
    last.resume();
  }
  last.finish();
  if (all_kept)
    last.begin(t, weights, rescale);
  else
    begin_kept(kept, t, weights, rescale, last);
  if constexpr (!rows_for_matrix_unit<P>) last.finish();
  return kept;
}

struct no_prefetch {
  void operator()(idx_t, idx_t) const {}
};

/// The slot of the key at the position of the last query, or the last slot. Where rows leave out keys, the block with
/// this slot and the first one are attended first: then the maxima are soon the final ones (where a head looks at its
/// neighbours, of 4096 keys .90 in place of .06 are left out at an error below 1e-3).
template <class P>
[[gnu::noinline]] idx_t own_slot(const row_block<P>& block, const packed_keys<P>& keys, idx_t shift) {
  idx_t begin = (std::numeric_limits<idx_t>::max)(), end = 0;
  for (idx_t r = 0; r < block.rows; ++r) {
    begin = (std::min)(begin, block.ranges[r].begin);
    end = (std::max)(end, block.ranges[r].end);
  }
  if (begin >= end) return 0;
  const idx_t own = keys.positions.find(block.positions[block.rows - 1] + shift, begin, end);
  return own < 0 ? end - 1 : own;
}

/// Attends the block to the slots of `keys` that the ranges of its rows name. prefetch(r, n) is called once for the
/// rows from r to r + n - 1, before they are first attended: it may prefetch memory that is needed when they are done.
/// `common`, sums of the block, may be those of several calls; the caller finishes them.
template <class P, class Keys, class Score, class Prefetch = no_prefetch>
void attend(const row_block<P>& block, const Keys& keys, const score_terms<sum_type<P>, Score>& terms,
            const Prefetch& prefetch = {}, long_row_sums<P>* common = nullptr) {
  long_row_sums<P> own = block.sums(), &sums = common ? *common : own;
  idx_t asked = 0, most = 0;  // most: keys of a row
  for (idx_t r = 0; r < block.rows; ++r) most = (std::max)(most, block.ranges[r].end - block.ranges[r].begin);
  if (!common && !block.fixed && most > long_segment) own.begin();
  tile_output<P, Keys> last{block.state, keys};
  const bool long_rows = sums.begun();
  // Of tiles at fixed places a row is long by the slots that it has seen, whatever others see.
  const auto long_from = [&](const tile& t) -> idx_t {
    if (!block.fixed || common)
      return (block.fixed ? sums.begun() : long_rows) ? (std::numeric_limits<idx_t>::max)() : 0;
    return t.first / long_segment * long_segment;
  };
  constexpr idx_t step = tile_keys<P>;
  const slot_blocks<sum_type<P>, step> blocks(
      block.ranges, block.rows, block.fixed, terms.skip.leaves_out() ? own_slot(block, keys, terms.query_shift) : -1);
  if (block.fixed && !common) own.start_at(blocks.start);
  idx_t seen = 0, left_out = 0;
  for (idx_t n = 0; n < blocks.count; ++n) {
    if (sums.full(step)) last.finish();
    sums.next(step);
    for (idx_t row = 0; row < block.rows; row += tile_rows) {
      const tile t = tile_of(block.ranges, row, block.rows, blocks[n], block.fixed, unit_of_tiles<P>(block.fixed));
      if (t.low >= t.high) continue;
      if (const idx_t end = t.row + t.rows; end > asked) {
        const idx_t begin = std::exchange(asked, end);
        prefetch(begin, end - begin);
      }
      const kept_blocks kept = attend_tile(block, keys, t, terms, last, long_from(t));
      if (terms.skip) seen += ceil_div(t.count, skip_keys), left_out += kept.left_out(t.count);
    }
  }
  last.finish();
  own.finish();
  if (terms.skip) terms.skip.count(seen, left_out);
}

/// Ends the block: stores its rows in out.row(which[r]) and lse[which[r] * lse_stride].
template <class P, class S>
void finish(const row_block<P>& block, const matrix_view<S>& out, const sum_type<P>* sink, sum_type<P>* lse,
            idx_t lse_stride) {
  for (idx_t r = 0; r < block.rows; ++r) {
    const idx_t i = block.positions[r];
    block.state.finish_row(r, sink, out.row(i), out.col_stride, lse ? lse + i * lse_stride : nullptr);
  }
}

/// Sets the rows of padding of one head to zero, and their lse to -infinity.
template <class T, class S>
void clear_rows(const matrix_view<S>& out, idx_t begin, idx_t end, T* lse, idx_t lse_stride) {
  clear_rows(out, begin, end);
  for (idx_t i = begin; lse && i < end; ++i) lse[i * lse_stride] = -std::numeric_limits<T>::infinity();
}

}}}  // namespace attn::ATTN_ISA::detail
