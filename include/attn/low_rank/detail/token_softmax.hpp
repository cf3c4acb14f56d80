// attn: weighted sums of keys and values over tokens, K' = P^T K and V' = P^T V, with P = softmax over tokens of
// logits.
//
// A segment of tokens is divided into parts of part_size, each with its own maximum, whose sums are then merged. Parts
// begin at fixed tokens, and any thread may compute any part.
#pragma once

#include <attn/core/detail/exp.hpp>
#include <attn/low_rank/detail/panel_product.hpp>

namespace attn::inline ATTN_ISA::detail {

inline constexpr index part_size = 256;

/// Scratch of one thread: panels [part_size][panel_width] of keys and values, and weights [part_size][tile_rows].
template <class T>
struct token_sums_scratch {
  T *keys, *values, *weights;

  static token_sums_scratch layout(arena& memory, index dim, index dim_v) {
    return {memory.allocate<T>(part_size * round_up(dim, panel_width<T>)),
            memory.allocate<T>(part_size * round_up(dim_v, panel_width<T>)), memory.allocate<T>(part_size * tile_rows)};
  }
};

/// Sums of one head: `rank` columns for each segment.
template <class T>
struct token_sums {
  index rank = 0, dim = 0, dim_v = 0;
  T *part_keys = nullptr, *part_values = nullptr;  // [part][rank][padded dim]: relative to the part's maximum
  T *maximum = nullptr, *sum = nullptr;            // [part][rank]: of the logits, of the weights
  T *all_keys = nullptr, *all_values = nullptr;    // [segment][rank][padded dim]: the result; where a segment is one
                                                   // part, in its place

  static index parts(index segment) { return ceil_div(segment, part_size); }
  index padded() const { return round_up(dim, panel_width<T>); }
  index padded_v() const { return round_up(dim_v, panel_width<T>); }
  T* keys(index segment, index c) const { return all_keys + (segment * rank + c) * padded(); }
  T* values(index segment, index c) const { return all_values + (segment * rank + c) * padded_v(); }

  static token_sums layout(arena& memory, index segments, index segment, index rank, index dim, index dim_v) {
    token_sums s{rank, dim, dim_v};
    const index rows = segments * parts(segment) * rank;
    s.part_keys = memory.allocate<T>(rows * s.padded()), s.part_values = memory.allocate<T>(rows * s.padded_v());
    s.maximum = memory.allocate<T>(rows), s.sum = memory.allocate<T>(rows);
    const bool merged = parts(segment) > 1;
    s.all_keys = merged ? memory.allocate<T>(segments * rank * s.padded()) : s.part_keys;
    s.all_values = merged ? memory.allocate<T>(segments * rank * s.padded_v()) : s.part_values;
    return s;
  }

  /// Sums part number `part` of segments of `segment` tokens.
  template <class S>
  void add_part(index part, index segment, const matrix_view<const S>& logits, const matrix_view<const S>& k,
                const matrix_view<const S>& v, const token_sums_scratch<T>& s) const {
    const index first = part / parts(segment) * segment, from = part % parts(segment) * part_size;
    const index begin = first + from, count = std::min(part_size, segment - from);
    pack_panels<T>([&](index n) { return k.row(begin + n); }, 0, count, dim, k.col_stride, s.keys, part_size);
    pack_panels<T>([&](index n) { return v.row(begin + n); }, 0, count, dim_v, v.col_stride, s.values, part_size);
    for (index c = 0; c < rank; c += tile_rows) {
      const index columns = std::min<index>(tile_rows, rank - c), row = part * rank + c;
      weigh(logits, begin, count, c, columns, s.weights, maximum + row, sum + row);
      multiply(s.weights, s.keys, count, columns, dim, part_keys + row * padded(), padded());
      multiply(s.weights, s.values, count, columns, dim_v, part_values + row * padded_v(), padded_v());
    }
  }

  /// The sum of the weights of row `row`, [segment][rank], relative to the maximum of its logits; 0 where every logit
  /// is -infinity.
  T total(index row, index segment, T& highest) const {
    const index first = row / rank * parts(segment) * rank + row % rank, end = first + parts(segment) * rank;
    T all = 0;
    highest = -std::numeric_limits<T>::infinity();
    for (index n = first; n < end; n += rank)
      highest = maximum[n] > highest || maximum[n] != maximum[n] ? maximum[n] : highest;  // NaN stays
    for (index n = first; n < end && highest != -std::numeric_limits<T>::infinity(); n += rank)
      all += sum[n] * std::exp(maximum[n] - highest);
    return all;
  }

  /// Merges the parts of one segment: keys(n, c) and values(n, c) are then the result.
  void merge(index n, index segment) const {
    const index begin = n * parts(segment), end = begin + parts(segment);
    for (index c = 0; c < rank; ++c) {
      T highest;
      const T all = total(n * rank + c, segment, highest);
      for (index p = begin; p < end; ++p) {
        const index row = p * rank + c;
        const T factor = all == T(0) ? T(0) : std::exp(maximum[row] - highest) / all;
        add_scaled(keys(n, c), part_keys + row * padded(), dim, factor, p == begin);
        add_scaled(values(n, c), part_values + row * padded_v(), dim_v, factor, p == begin);
      }
    }
  }

 private:
  /// to += factor from, or to = factor from; a factor of 0 adds nothing, not even NaN.
  static void add_scaled(T* to, const T* from, index count, T factor, bool first) {
    if (factor != T(0))
      for (index d = 0; d < count; ++d) to[d] = (first ? T(0) : to[d]) + from[d] * factor;
    else if (first)
      std::fill_n(to, count, T(0));
  }

  /// weights[n][m] = e^(logit - maximum) of `columns` columns from c on; columns beyond them repeat the last.
  template <class S>
  static void weigh(const matrix_view<const S>& logits, index begin, index count, index c, index columns, T* weights,
                    T* maximum, T* sum) {
    constexpr T nothing = -std::numeric_limits<T>::infinity();
    T highest[tile_rows], total[tile_rows] = {};
    std::fill_n(highest, tile_rows, nothing);
    for (index n = 0; n < count; ++n) {
      const S* const row = logits.row(begin + n) + c * logits.col_stride;
      T* const to = weights + n * tile_rows;
      for (index m = 0; m < tile_rows; ++m) to[m] = static_cast<T>(row[std::min(m, columns - 1) * logits.col_stride]);
      for (index m = 0; m < tile_rows; ++m) highest[m] = to[m] > highest[m] || to[m] != to[m] ? to[m] : highest[m];
    }
    for (index n = 0; n < count; ++n)
      for (index m = 0; m < tile_rows; ++m) weights[n * tile_rows + m] -= highest[m] == nothing ? T(0) : highest[m];
    attn::exp(weights, weights, count * tile_rows);
    for (index n = 0; n < count; ++n)
      for (index m = 0; m < tile_rows; ++m) total[m] += weights[n * tile_rows + m];
    std::copy_n(highest, columns, maximum);
    std::copy_n(total, columns, sum);
  }

  /// out[m] = sum over tokens of weights[n][m] panel rows n, for `columns` rows m.
  static void multiply(const T* weights, const T* panels, index count, index columns, index cols, T* out,
                       index out_stride) {
    panel_product<T>([&](index) { return packed_rows<T>{weights}; }, columns, panels, part_size, cols, count,
                     [&](index m, index col, const auto& x) {
                       if (m < columns) store<T>(out + m * out_stride + col, x);
                     });
  }
};

}  // namespace attn::inline ATTN_ISA::detail
