// attn: steps 1 and 2 of blockwise attention (blockwise.hpp), forward and backward: which tiles there are, and their
// scores.
#pragma once

#include <attn/softmax/detail/score_terms.hpp>
#include <attn/softmax/detail/tile_output.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// tile_scores() of M rows.
template <class P, int M>
void scores_of_rows(const P* queries, const packed_keys<P>& keys, idx_t first, idx_t count, sum_type<P>* scores) {
  using T = sum_type<P>;
  using left = prefetching_rows<P, row_chunks<P>>;
  const idx_t depth = operands<P>(keys.dim);
  const auto lines = [&] {
    return keys.next ? keys.next->next(depth) : prefetched_lines{};
  };
  for (idx_t n = 0; n < count;) {
    const idx_t slot = first + n, half = slot % panel_width<T>;
#if ATTN_HAS_AMX
    if constexpr (rows_for_matrix_unit<P>)  // whole tiles of sums are stored in place
      if (half == 0 && count - n >= 2 * panel_width<T> && depth % unit_pairs == 0 && prepare_matrix_unit()) {
        for (int of = 0; of < 2 && keys.next; ++of) keys.next->next(2 * depth).fetch(0, 2 * depth);
        unit_product<4, panel_width<T>, P, row_chunks<P>>{{queries}, keys.key_panel(slot), depth * panel_width<T>}.run(
            depth, scores + n, score_stride);
        n += 2 * panel_width<T>;
        continue;
      }
#endif
    const auto put = [&](auto m, auto vector, const auto& x) {
      store<T>(scores + m * score_stride + n + vector * width<T>, x);
    };
    if (half == 0 && count - n >= panel_width<T>) {
      tile_product<P, M, 2>(left{{queries}, {lines(), lines()}}, keys.key_panel(slot), depth, put);
      n += panel_width<T>;
    } else {
      tile_product<P, M, 1>(left{{queries}, {lines(), lines()}}, keys.key_panel(slot - half) + half, depth, put);
      n += width<T>;
    }
  }
}

/// Step 1: products of `rows` <= tile_rows rows in chunks and slots [first, first + count), both multiples of a vector;
/// the first and the last panel may be half used.
template <class P, class Keys>
void tile_scores(const P* queries, idx_t rows, const Keys& keys, idx_t first, idx_t count, sum_type<P>* scores) {
  if constexpr (may_be_rows<Keys>)
    if (keys.key_rows)
      return with_tile_height(rows, [&](auto M) {
        scores_in_place<P, M.value>(queries, keys, first, count, scores, score_stride);
      });
  if (rows > 2 * tile_step)
    scores_of_rows<P, tile_rows>(queries, keys, first, count, scores);
  else if (rows > tile_step)
    scores_of_rows<P, 2 * tile_step>(queries, keys, first, count, scores);
  else
    scores_of_rows<P, tile_step>(queries, keys, first, count, scores);
}

/// Slots whose sums the matrix unit adds in an order of its own are whole in tiles of fixed places.
template <class P>
constexpr idx_t unit_of_tiles(bool fixed) {
  return fixed && rows_for_matrix_unit<P> ? panel_width<sum_type<P>> : width<sum_type<P>>;
}

/// The slots that any of `rows` rows sees; none where begin >= end.
[[gnu::noinline]] inline key_range seen_of_any(const key_range* ranges, idx_t rows) {
  key_range all{(std::numeric_limits<idx_t>::max)(), 0};
  for (idx_t r = 0; r < rows; ++r)
    if (ranges[r].begin < ranges[r].end)
      all = {(std::min)(all.begin, ranges[r].begin), (std::max)(all.end, ranges[r].end)};
  return all;
}

/// The tile of up to tile_rows of `rows` rows, from `row` on, and of a block of slots, in whole units. No slot is seen
/// where low >= high.
[[gnu::noinline]] inline tile tile_of(const key_range* ranges, idx_t row, idx_t rows, const key_range& block,
                                      bool fixed, idx_t unit) {
  const auto [from, to] = block;
  tile t{.row = row, .rows = std::min<idx_t>(tile_rows, rows - row), .low = to, .high = from};
  idx_t all_from = from, all_to = to;
  for (idx_t r = row; r < row + t.rows; ++r) {
    all_from = (std::max)(all_from, ranges[r].begin);
    all_to = (std::min)(all_to, ranges[r].end);
    if (ranges[r].begin >= ranges[r].end) continue;
    t.low = (std::min)(t.low, (std::max)(ranges[r].begin, from));
    t.high = (std::max)(t.high, (std::min)(ranges[r].end, to));
  }
  t.first = t.low / unit * unit;
  t.count = round_up(t.high, unit) - t.first;
  t.fixed = fixed;
  t.masked = t.first < all_from || t.first + t.count > all_to;
  return t;
}

/// The slots that any of some rows sees, in blocks of Step, in the order in which they are attended: ascending, unless
/// a slot `own` >= 0 is given. Then the block with this slot comes first, then the first block, then those before
/// `own`, backward, then the others. `fixed`: blocks begin at multiples of Step: what a row gets does not depend on
/// which slots others see, but for zeros that are added.
template <class T, idx_t Step = key_block>
struct slot_blocks {
  idx_t start, end, count, own;

  slot_blocks(const key_range* ranges, idx_t rows, bool fixed = false, idx_t own_slot = -1) : own(own_slot) {
    const key_range seen = seen_of_any(ranges, rows);
    const idx_t place = fixed ? Step : panel_width<T>;
    start = seen.begin / place * place, end = seen.end;
    count = seen.begin < end ? ceil_div(end - start, Step) : 0;
    if (own >= 0 && count > 0) own = std::clamp(own - start, idx_t(0), end - 1 - start) / Step;
  }
  key_range operator[](idx_t n) const {
    const idx_t from = start + (n > own ? n : n == 0 ? own : n == 1 ? 0 : own - n + 1) * Step;
    return {from, (std::min)(from + Step, end)};
  }
};

/// Which keys of a tile the mask leaves visible: all, some or none.
template <class T, class Score>
mask_coverage seen_of_tile(const key_range* ranges, const index_map& positions, const index_map& keys, const tile& t,
                           const score_terms<T, Score>& terms) {
  bool any = false, all = true;
  const idx_t rows = terms.mask.extent(2) == 1 ? 1 : t.rows;  // one row serves all queries of the tile
  for (idx_t m = 0; m < t.rows && rows > 1 && !positions.list; ++m)  // prefetch the next tile: rows are far apart
    terms.prefetch_mask(positions[t.row + t.rows + m], t.high - t.low, keys, t.low);
  for (idx_t m = 0; m < rows && (all || !any); ++m) {
    const key_range seen = rows == 1 ? key_range{t.low, t.high} : ranges[t.row + m];
    const idx_t begin = (std::max)(seen.begin, t.low), end = (std::min)(seen.end, t.high);
    if (begin >= end) continue;
    const mask_coverage row = terms.seen(positions[t.row + m], end - begin, keys, begin);
    any |= row != mask_coverage::none, all &= row == mask_coverage::all;
  }
  return any ? (all ? mask_coverage::all : mask_coverage::some) : mask_coverage::none;
}

/// Step 2 of masked_scores().
template <class P, class T, class Score>
[[gnu::noinline]] void finish_scores(const T* relative, const key_range* ranges, const index_map& positions,
                                     const packed_keys<P>& keys, const tile& t, const score_terms<T, Score>& terms,
                                     mask_coverage coverage, T* s, T* raw, T factor, T* left) {
  const idx_t first = t.first, count = t.count;
  const bool any = terms.any_but_mask() || coverage == mask_coverage::some;
  if (left && !terms.any_but_mask() && !relative && !terms.by_position && factor > 0)
    *left = factor;
  else if (numbers_of<P> > 1)
    for (idx_t m = 0; m < t.rows; ++m)
      for (T* x = s + m * score_stride; x < s + m * score_stride + count; x += width<T>)
        store<T>(x, mul(load<T>(x), broadcast<T>(factor)));
  if (relative)
    terms.by_distance.add_tile(relative, positions.from(t.row), terms.query_shift, terms.head, keys.positions, t, s);
  if (terms.by_position)
    terms.by_position.add_tile(keys, positions.from(t.row), terms.query_shift, terms.head, t, terms.query_factor(), s);
  for (idx_t m = 0; raw && m < t.rows; ++m) std::copy_n(s + m * score_stride, count, raw + m * score_stride);
  for (idx_t m = 0; m < t.rows && (t.masked || any); ++m) {
    T* const row = s + m * score_stride;
    const key_range seen = ranges[t.row + m];
    const idx_t begin = std::clamp(seen.begin - first, idx_t(0), count);
    const idx_t end = std::clamp(seen.end - first, begin, count);
    if (any && begin < end) terms.apply(row + begin, end - begin, positions[t.row + m], keys.positions, first + begin);
    std::fill(row, row + begin, -std::numeric_limits<T>::infinity());
    std::fill(row + end, row + count, -std::numeric_limits<T>::infinity());
  }
}

/// Steps 1 and 2 for a tile: scores of its packed queries, in base 2, with -infinity where a row does not see a slot.
/// `relative` are the queries of relative keys, null where there are none.
/// `raw`, if given, receives the scores as they were before the terms. With bf16 pairs scores are multiplied by
/// `factor` here, unless `left` is given, `factor` is positive and there is no term but a mask: then `factor` is stored
/// in `left` for later. Where a mask hides the whole tile, nothing is computed, and it returns false.
template <class P, class Keys, class T, class Score>
bool masked_scores(const P* queries, const T* relative, const key_range* ranges, const index_map& positions,
                   const Keys& keys, const tile& t, const score_terms<T, Score>& terms, T* s,
                   T* raw = nullptr, T factor = 1, T* left = nullptr) {
  const mask_coverage coverage =
      terms.mask ? seen_of_tile(ranges, positions, keys.positions, t, terms) : mask_coverage::all;
  if (coverage == mask_coverage::none) return false;
  tile_scores(queries, t.rows, keys, t.first, t.count, s);
  finish_scores<P>(relative, ranges, positions, keys, t, terms, coverage, s, raw, factor, left);
  return true;
}

}}}  // namespace attn::ATTN_ISA::detail
