// attn: the online softmax of some rows: the state of each after some of its keys.
//
//   maximum   m = max_j s_j, of scores in base 2
//   sum       l = sum_j 2^(s_j - m)
//   out       o = sum_j 2^(s_j - m) v_j        the result is o / l
//
// Milakov, Gimelshein 2018, "Online normalizer calculation for softmax".
#pragma once

#include <attn/core/detail/exp.hpp>
#include <attn/core/detail/tile_product.hpp>
#include <attn/core/execution.hpp>

#include <cmath>

namespace attn::inline ATTN_ISA::detail {

template <class T>
inline constexpr T log2_e = T(1.442695040888963407359924681001892137L);
template <class T>
inline constexpr T ln_2 = T(0.693147180559945309417232121458176568L);

/// The sum of a row may be stored as Lanes partial sums, one per lane of a vector.
template <class T, int Lanes = 1>
struct online_softmax {
  index rows = 0, cols = 0, stride = 0;
  T* maximum = nullptr;  // [rows]
  T* sum = nullptr;      // [rows][Lanes]
  T* out = nullptr;      // [rows][stride]

  /// Rows of whole packets. `step` rounds their stride up further.
  static online_softmax layout(arena& memory, index rows, index cols, index step = width<T>) {
    const index stride = round_up(cols, step);
    return {.rows = rows,
            .cols = cols,
            .stride = stride,
            .maximum = memory.allocate<T>(rows),
            .sum = memory.allocate<T>(rows * Lanes),
            .out = memory.allocate<T>(rows * stride)};
  }

  T* row(index r) const { return out + r * stride; }
  T row_sum(index r) const {
    if constexpr (Lanes == 1)
      return sum[r];
    else
      return sum_lanes(load<T>(sum + r * Lanes));
  }

  /// The first `count` rows have seen no key.
  void clear(index count) const {
    std::fill_n(maximum, count, -std::numeric_limits<T>::infinity());
    std::fill_n(sum, count * Lanes, T(0));
    std::fill_n(out, count * stride, T(0));
  }
  void clear() const { clear(rows); }

  /// Copies row `from_row` of another state to row r.
  template <int Others>
  void copy_row(index r, const online_softmax<T, Others>& from, index from_row) const {
    const T* const source = from.row(from_row);
    for (index d = 0; d < cols; d += width<T>) store<T>(row(r) + d, load<T>(source + d));
    std::fill_n(sum + r * Lanes, Lanes, T(0));
    sum[r * Lanes] = from.row_sum(from_row);
    maximum[r] = from.maximum[from_row];
  }

  /// Merges another state of the same rows into this one.
  void merge(const online_softmax& other) const
    requires(Lanes == 1)
  {
    for (index r = 0; r < rows; ++r) {
      if (other.sum[r] == T(0)) continue;  // it has seen no key; a sum of NaN is merged
      const T highest = std::max(maximum[r], other.maximum[r]);
      const T reference = highest == -std::numeric_limits<T>::infinity() ? T(0) : highest;
      const T own = std::exp2(maximum[r] - reference), others = std::exp2(other.maximum[r] - reference);
      maximum[r] = highest;
      sum[r] = sum[r] * own + other.sum[r] * others;
      for (index d = 0; d < cols; ++d) row(r)[d] = row(r)[d] * own + other.row(r)[d] * others;
    }
  }

  /// Ends row r: the output and the natural log-sum-exp, `sink` (a logit without a value, base e) included; one of
  /// -infinity is none. A row that has seen no key becomes 0 and its lse -infinity, sink or not.
  template <class S>
  void finish_row(index r, const T* sink, S* to, index to_stride, T* lse) const {
    const T* const o = row(r);
    T total = row_sum(r), highest = maximum[r], factor = T(1);
    if (sink && highest != -std::numeric_limits<T>::infinity()) {
      const T logit = *sink * log2_e<T>, higher = std::max(highest, logit);
      factor = std::exp2(highest - higher);
      total = total * factor + std::exp2(logit - higher);
      highest = higher;
    }
    if (lse) *lse = (highest + std::log2(total)) * ln_2<T>;
    const T normal = total == T(0) ? T(0) : factor / total;
    if (to_stride == 1)
      for (index d = 0; d < cols; ++d) to[d] = static_cast<S>(o[d] * normal);
    else
      for (index d = 0; d < cols; ++d) to[d * to_stride] = static_cast<S>(o[d] * normal);
  }
};

}  // namespace attn::inline ATTN_ISA::detail
