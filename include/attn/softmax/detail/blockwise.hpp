// attn: the one blockwise kernel of exact softmax attention.
//
// A row_block holds up to max_rows queries of one head and what is known so far of their softmax: the running maximum
// m, the denominator l and the unnormalised output o (online softmax: Milakov & Gimelshein 2018, Rabe & Staats 2021,
// Dao 2022). attend() takes it through packed keys, any number of times, in any order of disjoint key sets:
//
//   for every block of keys, for every tile of rows:
//     1. scores   S = Q K^T           tile_product, rows x panels
//     2. terms    softcap, bias, ...  only where asked for; keys outside a row's span become -infinity
//     3. softmax  m, P = 2^(S - m), l
//     4. output   o = o 2^(m_old - m) + P V
//
// A tile's scores (18 KiB) never leave the first-level cache; a block of keys and values is reused from the
// second-level cache by all tiles. Which keys a row sees is a span of slots per row: the kernel knows no pattern.
// Panels no row of a tile sees are not touched. A key whose weight is exactly 0 contributes nothing, whatever its
// value: not even NaN.
#pragma once

#include <attn/softmax/detail/score_terms.hpp>

namespace attn::inline ATTN_ISA::detail {

inline constexpr index max_rows = 96;                // a multiple of every tile height
inline constexpr index key_block = 384;              // keys a tile takes at a time
inline constexpr int score_stride = key_block + 16;  // rows of a tile fall into different cache sets

template <class T>
struct row_block {
  static constexpr index wide = panel_width<T>;

  T* queries = nullptr;  // per tile [dim][tile_rows]
  T* scores = nullptr;   // [tile_rows][score_stride]
  T* out = nullptr;      // [max_rows][out_stride]
  T* sum = nullptr;      // [max_rows][width]: l, kept per lane until the end
  T* top = nullptr;      // [max_rows]: m, in base 2
  key_range* span = nullptr;
  index dim = 0, dim_v = 0, out_stride = 0;
  index rows = 0;
  index_map positions;  // which query a row is

  static row_block layout(arena& memory, index dim, index dim_v) {
    row_block block;
    block.dim = dim;
    block.dim_v = dim_v;
    block.out_stride = round_up(dim_v, wide);
    block.queries = memory.allocate<T>(max_rows * dim + width<T>);
    block.scores = memory.allocate<T>(tile_rows * score_stride);
    block.out = memory.allocate<T>(max_rows * block.out_stride);
    block.sum = memory.allocate<T>(max_rows * width<T>);
    block.top = memory.allocate<T>(max_rows);
    block.span = memory.allocate<key_range>(max_rows);
    return block;
  }

  /// Takes `count` queries, rows which[...] of q, that have seen nothing yet.
  template <class S>
  void begin(const matrix_view<const S>& q, const index_map& which, index count, T factor) {
    rows = count;
    positions = which;
    for (index r = 0; r < rows; r += tile_rows) {
      const auto row = [&](index i) { return q.row(positions[r + i]); };
      pack_rows<T>(row, std::min<index>(tile_rows, rows - r), dim, q.col_stride, factor, queries + r * dim);
    }
    const index padded = round_up(rows, tile_rows);
    std::fill_n(out, padded * out_stride, T(0));
    std::fill_n(sum, padded * width<T>, T(0));
    std::fill_n(top, padded, -std::numeric_limits<T>::infinity());
    std::fill_n(span, padded, key_range{});
  }
};

/// Step 1: scores of M rows against slots [first, first + count), both multiples of a vector; a panel at either end may
/// be half.
template <class T, int M>
void tile_scores(const T* queries, const packed_keys<T>& slab, index first, index count, T* scores) {
  for (index n = 0; n < count;) {
    const index slot = first + n, half = slot % panel_width<T>;
    const auto put = [&](auto m, auto vector, const auto& x) {
      store<T>(scores + m * score_stride + n + vector * width<T>, x);
    };
    if (half == 0 && count - n >= panel_width<T>) {
      tile_product<T, M, 2>(packed_rows<T>{queries}, slab.key_panel(slot), slab.dim, put);
      n += panel_width<T>;
    } else {
      tile_product<T, M, 1>(packed_rows<T>{queries}, slab.key_panel(slot - half) + half, slab.dim, put);
      n += width<T>;
    }
  }
}

/// Step 4: out[m] = out[m] * rescale[m] + weights of M rows times the values of slots [low, high).
template <class T, int M>
void tile_output(const T* weights, const T* rescale, const packed_keys<T>& slab, index low, index high, T* out,
                 index out_stride) {
  const left_operand<T, score_stride, 1> a{weights};
  for (index col = 0; col < slab.dim_v; col += panel_width<T>) {
    const auto update = [&](auto m, auto half, const auto& x) {
      T* const o = out + m * out_stride + col + half * width<T>;
      store<T>(o, fma(load<T>(o), broadcast<T>(rescale[m]), x));
    };
    if (col + width<T> < slab.dim_v)
      tile_product<T, M, 2>(a, slab.value_panel(col, low), high - low, update);
    else
      tile_product<T, M, 1>(a, slab.value_panel(col, low), high - low, update);
  }
}

/// Step 4 where a value is not finite: weight by weight, those of 0 left out. Same sums, to the last bit.
template <class T>
[[gnu::noinline]] void careful_output(const T* weights, const T* rescale, const packed_keys<T>& slab, index low,
                                      index high, index rows, T* out, index out_stride) {
  for (index m = 0; m < rows; ++m)
    for (index col = 0; col < slab.dim_v; col += width<T>) {
      packet<T> x = zero<T>();
      for (index n = low; n < high; ++n) {
        const T weight = weights[m * score_stride + n - low];
        if (weight == T(0)) continue;
        x = fma(broadcast<T>(weight),
                load<T>(slab.value_panel(col / panel_width<T> * panel_width<T>, n) + col % panel_width<T>), x);
      }
      T* const o = out + m * out_stride + col;
      store<T>(o, fma(load<T>(o), broadcast<T>(rescale[m]), x));
    }
}

/// Step 3, first half, for one row: raises `top` to the maximum of its new scores. Returns the power of two that takes
/// what was summed up so far to the new `reference`.
template <class T>
ATTN_INLINE T row_maximum(const T* row, index count, T& top, T& reference) {
  constexpr T minus_infinity = -std::numeric_limits<T>::infinity();
  packet<T> highest = broadcast<T>(minus_infinity);
  index n = 0;
  for (; n + panel_width<T> <= count; n += panel_width<T>)
    highest = max(highest, max(load<T>(row + n), load<T>(row + n + width<T>)));
  if (n < count) highest = max(highest, load<T>(row + n));
  const T old = top;
  top = std::max(old, max_lanes(highest));
  reference = top == minus_infinity ? T(0) : top;  // a row that has seen no key: 2^(-infinity - 0) = 0
  return old - reference;
}

/// Attends the tile of rows from r0 on to the slots [from, to) its spans reach into.
template <class T, class Terms>
void attend_tile(const row_block<T>& block, index r0, const packed_keys<T>& slab, index from, index to,
                 const Terms& terms) {
  const index rows = std::min<index>(tile_rows, block.rows - r0);
  const key_range* span = block.span + r0;
  index low = to, high = from, all_from = from, all_to = to;
  for (index m = 0; m < rows; ++m) {
    all_from = std::max(all_from, span[m].begin);
    all_to = std::min(all_to, span[m].end);
    if (span[m].begin >= span[m].end) continue;
    low = std::min(low, std::max(span[m].begin, from));
    high = std::max(high, std::min(span[m].end, to));
  }
  if (low >= high) return;
  const index first = low / width<T> * width<T>, count = round_up(high, width<T>) - first;
  const bool masked = first < all_from || first + count > all_to;
  T* const s = block.scores;

  with_tile_height(rows,
                   [&](auto M) { tile_scores<T, M.value>(block.queries + r0 * block.dim, slab, first, count, s); });

  for (index m = 0; m < rows && (masked || terms.any()); ++m) {
    T* const row = s + m * score_stride;
    const index begin = std::clamp(span[m].begin - first, index(0), count);
    const index end = std::clamp(span[m].end - first, begin, count);
    if (terms.any() && begin < end)
      terms.apply(row + begin, end - begin, block.positions[r0 + m], slab.positions, first + begin);
    std::fill(row, row + begin, -std::numeric_limits<T>::infinity());
    std::fill(row + end, row + count, -std::numeric_limits<T>::infinity());
  }

  alignas(64) T reference[tile_rows], rescale[round_up(tile_rows, width<T>)] = {};
  for (index m = 0; m < rows; ++m)
    rescale[m] = row_maximum(s + m * score_stride, count, block.top[r0 + m], reference[m]);
  for (index m = 0; m < rows; m += width<T>) store<T>(rescale + m, exp2_weight<T>(load<T>(rescale + m)));
  for (index m = 0; m < rows; ++m) {
    T* const row = s + m * score_stride;
    T* const total = block.sum + (r0 + m) * width<T>;
    packet<T> sum = mul(load<T>(total), broadcast<T>(rescale[m]));
    for (index n = 0; n < count; n += width<T>) {
      const packet<T> weight = exp2_weight<T>(sub(load<T>(row + n), broadcast<T>(reference[m])));
      store<T>(row + n, weight);
      sum = add(sum, weight);
    }
    store<T>(total, sum);
  }

  T* const out = block.out + r0 * block.out_stride;
  const T* const weights = s + low - first;
  if (slab.all_finite(low, high)) [[likely]]
    with_tile_height(
        rows, [&](auto M) { tile_output<T, M.value>(weights, rescale, slab, low, high, out, block.out_stride); });
  else
    careful_output(weights, rescale, slab, low, high, rows, out, block.out_stride);
}

struct no_ahead {
  void operator()(index, index) const {}
};

/// Takes the block through the slots of `slab` its rows' spans name. ahead(r, n) is called before rows r ... r + n - 1
/// are: it may ask for memory that will be needed when they are done.
template <class T, class Terms, class Ahead = no_ahead>
void attend(const row_block<T>& block, const packed_keys<T>& slab, const Terms& terms, const Ahead& ahead = {}) {
  index begin = slab.capacity, end = 0;
  for (index r = 0; r < block.rows; ++r) {
    if (block.span[r].begin >= block.span[r].end) continue;
    begin = std::min(begin, block.span[r].begin);
    end = std::max(end, block.span[r].end);
  }
  if (begin >= end) return;
  begin = begin / panel_width<T> * panel_width<T>;
  for (bool first = true; begin < end; begin += key_block, first = false)
    for (index r = 0; r < block.rows; r += tile_rows) {
      if (first) ahead(r, std::min<index>(tile_rows, block.rows - r));
      attend_tile(block, r, slab, begin, std::min(begin + key_block, end), terms);
    }
}

/// Ends one row: o, the sum of weights `sum` and the maximum `top` (base 2) of the keys seen become output and natural
/// log-sum-exp, `sink` (a logit without a value, base e) included. A row that has seen no key becomes 0 and its lse
/// -infinity, sink or not.
template <class T, class S>
void finish_row(const T* o, T sum, T top, const T* sink, index dim_v, S* out, index stride, T* lse) {
  T factor = T(1);
  if (sink && top != -std::numeric_limits<T>::infinity()) {
    const T logit = *sink * log2_e<T>, higher = std::max(top, logit);
    factor = std::exp2(top - higher);
    sum = sum * factor + std::exp2(logit - higher);
    top = higher;
  }
  if (lse) *lse = (top + std::log2(sum)) * ln_2<T>;
  const T normal = sum == T(0) ? T(0) : factor / sum;
  if (stride == 1)
    for (index d = 0; d < dim_v; ++d) out[d] = static_cast<S>(o[d] * normal);
  else
    for (index d = 0; d < dim_v; ++d) out[d * stride] = static_cast<S>(o[d] * normal);
}

/// Ends the block: its rows go to out.row(which[r]) and lse[which[r] * lse_stride].
template <class T, class S>
void finish(const row_block<T>& block, const matrix_view<S>& out, const T* sink, T* lse, index lse_stride) {
  for (index r = 0; r < block.rows; ++r) {
    const index i = block.positions[r];
    finish_row(block.out + r * block.out_stride, sum_lanes(load<T>(block.sum + r * width<T>)), block.top[r], sink,
               block.dim_v, out.row(i), out.col_stride, lse ? lse + i * lse_stride : nullptr);
  }
}

/// Zeros for the rows of padding of one head, and what goes with them.
template <class T, class S>
void clear_rows(const matrix_view<S>& out, index begin, index end, T* lse, index lse_stride) {
  clear_rows(out, begin, end);
  for (index i = begin; lse && i < end; ++i) lse[i * lse_stride] = -std::numeric_limits<T>::infinity();
}

}  // namespace attn::detail
