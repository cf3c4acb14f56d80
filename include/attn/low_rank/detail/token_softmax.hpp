// attn: weighted sums of keys and values over tokens, K' = P^T K and V' = P^T V, with P = softmax over tokens of
// logits.
//
// A segment of tokens is divided into parts of part_size, each with its own maximum, whose sums are then merged. Parts
// begin at fixed tokens, and any thread may compute any part.
#pragma once

#include <attn/core/detail/exp.hpp>
#include <attn/core/detail/prefetch.hpp>
#include <attn/low_rank/detail/panel_product.hpp>
#include <attn/low_rank/detail/attend_rows.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

inline constexpr idx_t part_size = 256;

/// Scratch of one thread: panels [part_size][panel_width] of keys and values, and weights [part_size][tile_rows], with
/// room for a packet after the last row.
template <class T>
struct token_sums_scratch {
  T *keys, *values, *weights;

  static token_sums_scratch layout(arena& memory, idx_t dim, idx_t dim_v) {
    return {memory.allocate<T>(part_size * round_up(dim, panel_width<T>)),
            memory.allocate<T>(part_size * round_up(dim_v, panel_width<T>)),
            memory.allocate<T>(part_size * tile_rows + width<T>)};
  }
};

/// Sums of one head: `rank` columns for each segment.
template <class T>
struct token_sums {
  idx_t rank = 0, dim = 0, dim_v = 0;
  T *part_keys = nullptr, *part_values = nullptr;  // [part][rank][padded dim]: relative to the part's maximum
  T *maximum = nullptr, *sum = nullptr;            // [part][rank]: of the logits, of the weights
  T *all_keys = nullptr, *all_values = nullptr;    // [segment][rank][padded dim]: the result; where a segment is one
                                                   // part, in its place

  static idx_t parts(idx_t segment) { return ceil_div(segment, part_size); }
  idx_t padded() const { return round_up(dim, panel_width<T>); }
  idx_t padded_v() const { return round_up(dim_v, panel_width<T>); }
  T* keys(idx_t segment, idx_t c) const { return all_keys + (segment * rank + c) * padded(); }
  T* values(idx_t segment, idx_t c) const { return all_values + (segment * rank + c) * padded_v(); }

  static token_sums layout(arena& memory, idx_t segments, idx_t segment, idx_t rank, idx_t dim, idx_t dim_v) {
    token_sums s{rank, dim, dim_v};
    const idx_t rows = segments * parts(segment) * rank;
    s.part_keys = memory.allocate<T>(rows * s.padded()), s.part_values = memory.allocate<T>(rows * s.padded_v());
    s.maximum = memory.allocate<T>(rows), s.sum = memory.allocate<T>(rows);
    const bool merged = parts(segment) > 1;
    s.all_keys = merged ? memory.allocate<T>(segments * rank * s.padded()) : s.part_keys;
    s.all_values = merged ? memory.allocate<T>(segments * rank * s.padded_v()) : s.part_values;
    return s;
  }

  /// Sums part number `part` of segments of `segment` tokens of batch item b.
  template <class S>
  void add_part(idx_t part, idx_t segment, const matrix_view<const S>& logits, const matrix_view<const S>& k,
                const matrix_view<const S>& v, const key_flags& keys, idx_t b, const token_sums_scratch<T>& s) const {
    const idx_t first = part / parts(segment) * segment, from = part % parts(segment) * part_size;
    const idx_t begin = first + from, count = (std::min)(part_size, segment - from);
    pack_panels<T>([&](idx_t n) { return k.row(begin + n); }, 0, count, dim, k.col_stride, s.keys, part_size);
    pack_panels<T>([&](idx_t n) { return v.row(begin + n); }, 0, count, dim_v, v.col_stride, s.values, part_size);
    const seen_range seen = keys.range(b, begin, begin + count);
    seen.clear_panels(s.keys, part_size, count, dim), seen.clear_panels(s.values, part_size, count, dim_v);
    line_prefetcher next;  // the next part
    for (const matrix_view<const S>& x : {k, v, logits})
      next.add(x, begin + count, (std::min)(begin + count + part_size, x.rows));
    for (idx_t c = 0; c < rank; c += tile_rows) {
      const idx_t columns = std::min<idx_t>(tile_rows, rank - c), row = part * rank + c;
      weigh(logits, begin, count, seen, c, columns, s.weights, maximum + row, sum + row);
      multiply(s.weights, s.keys, count, columns, dim, part_keys + row * padded(), padded(), next);
      multiply(s.weights, s.values, count, columns, dim_v, part_values + row * padded_v(), padded_v(), next);
    }
  }

  /// The sum of the weights of row `row`, [segment][rank], relative to the maximum of its logits; 0 where every logit
  /// is -infinity.
  T total(idx_t row, idx_t segment, T& highest) const {
    const idx_t first = row / rank * parts(segment) * rank + row % rank, end = first + parts(segment) * rank;
    T all = 0;
    highest = -std::numeric_limits<T>::infinity();
    for (idx_t n = first; n < end; n += rank)
      highest = maximum[n] > highest || maximum[n] != maximum[n] ? maximum[n] : highest;  // NaN stays
    for (idx_t n = first; n < end && highest != -std::numeric_limits<T>::infinity(); n += rank)
      all += sum[n] * std::exp(maximum[n] - highest);
    return all;
  }

  /// Merges the parts of one segment: keys(n, c) and values(n, c) are then the result.
  void merge(idx_t n, idx_t segment) const {
    const idx_t begin = n * parts(segment), end = begin + parts(segment);
    for (idx_t c = 0; c < rank; ++c) {
      T highest;
      const T all = total(n * rank + c, segment, highest);
      for (idx_t p = begin; p < end; ++p) {
        const idx_t row = p * rank + c;
        const T factor = all == T(0) ? T(0) : std::exp(maximum[row] - highest) / all;
        add_scaled(keys(n, c), part_keys + row * padded(), dim, factor, p == begin);
        add_scaled(values(n, c), part_values + row * padded_v(), dim_v, factor, p == begin);
      }
    }
  }

 private:
  /// to += factor from, or to = factor from; a factor of 0 adds nothing, not even NaN.
  static void add_scaled(T* to, const T* from, idx_t count, T factor, bool first) {
    if (factor != T(0))
      for (idx_t d = 0; d < count; ++d) to[d] = (first ? T(0) : to[d]) + from[d] * factor;
    else if (first)
      std::fill_n(to, count, T(0));
  }

  /// weights[n][m] = e^(logit - maximum) of `columns` columns from c on; those beyond them are not used. Logits of
  /// hidden tokens are -infinity.
  template <class S>
  static void weigh(const matrix_view<const S>& logits, idx_t begin, idx_t count, const seen_range& seen, idx_t c,
                    idx_t columns, T* weights, T* maximum, T* sum) {
    constexpr int w = width<T>, packets = (tile_rows + w - 1) / w;
    constexpr T nothing = -std::numeric_limits<T>::infinity();
    packet<T> highest[array_size<packets>], total[array_size<packets>];
    unroll<packets>([&](auto p) { highest[p] = broadcast<T>(nothing), total[p] = zero<T>(); });
    for (idx_t n = 0; n < count; ++n) {  // the last packet of a row reaches into the next row
      const S* const row = logits.row(begin + n) + c * logits.col_stride;
      unroll<packets>([&](auto p) {
        packet<T> x = broadcast<T>(nothing);
        if (!seen.hides(n))
          x = load_part<T>(row + p * w * logits.col_stride, logits.col_stride, logits.cols - c - p * w);
        highest[p] = (max)(highest[p], x);
        store<T>(weights + n * tile_rows + p * w, x);
      });
    }
    std::fill(weights + count * tile_rows, weights + round_up(count, w) * tile_rows, nothing);
    T lanes[array_size<packets * w>], subtracted[array_size<tile_rows * w>];  // of w rows
    unroll<packets>([&](auto p) { store<T>(lanes + p * w, highest[p]); });
    for (int i = 0; i < tile_rows * w; ++i)
      subtracted[i] = lanes[i % tile_rows] == nothing ? T(0) : lanes[i % tile_rows];
    for (idx_t n = 0; n < count; n += w)
      for (int i = 0; i < tile_rows * w; i += w) {
        T* const x = weights + n * tile_rows + i;
        store<T>(x, attn::detail::exp<T>(sub(load<T>(x), load<T>(subtracted + i))));
      }
    for (idx_t n = 0; n < count; ++n)
      unroll<packets>([&](auto p) { total[p] = add(total[p], load<T>(weights + n * tile_rows + p * w)); });
    std::copy_n(lanes, columns, maximum);
    unroll<packets>([&](auto p) { store<T>(lanes + p * w, total[p]); });
    std::copy_n(lanes, columns, sum);
    for (idx_t m = 0; m < columns; ++m)
      if (sum[m] != sum[m]) maximum[m] = sum[m];  // NaN stays
  }

  /// out[m] = sum over tokens of weights[n][m] panel rows n, for `columns` rows m. Meanwhile `next` is fetched.
  static void multiply(const T* weights, const T* panels, idx_t count, idx_t columns, idx_t cols, T* out,
                       idx_t out_stride, line_prefetcher& next) {
    const auto left = [&](idx_t) {
      return prefetching_rows<T>{{weights}, {next.next(count), next.next(count)}};
    };
    panel_product<T>(left, columns, panels, part_size, cols, count, [&](idx_t m, idx_t col, const auto& x) {
      if (m < columns) store<T>(out + m * out_stride + col, x);
    });
  }
};

}}}  // namespace attn::ATTN_ISA::detail
