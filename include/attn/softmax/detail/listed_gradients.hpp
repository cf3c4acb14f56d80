// attn: sums of gradients of rows that lists name: what the backward passes over lists of single keys share, those of
// selected_keys and of lightning_indexer. A part of the queries has sums of its own for all keys, and the parts are
// added in order, so that the number of threads changes no bit.
#pragma once

#include <attn/core/detail/gradients.hpp>
#include <attn/core/detail/sums_in_parts.hpp>
#include <attn/softmax/detail/backward_memory.hpp>
#include <attn/softmax/detail/streaming.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Rows of queries as numbers, padded with zeros to whole packets.
template <class T>
struct padded_rows {
  T* data = nullptr;
  idx_t stride = 0;

  static padded_rows layout(arena& memory, idx_t rows, idx_t dim) {
    const idx_t stride = round_up(dim, width<T>);
    return {memory.allocate<T>(rows * stride), stride};
  }
  T* row(idx_t r) const { return data + r * stride; }
  /// Row r from row i of x. Returns whether all of its numbers are finite.
  template <class S>
  bool load(idx_t r, const matrix_view<const S>& x, idx_t i) const {
    packet<T> trace = zero<T>();
    for (idx_t d = 0; d < stride; d += width<T>) {
      const packet<T> part = load_part<T>(x.row(i) + d * x.col_stride, x.col_stride, x.cols - d);
      trace = fma(part, zero<T>(), trace);
      store<T>(row(r) + d, part);
    }
    return sum_lanes(trace) == T(0);
  }
};

/// Sums of the gradients of all keys of a head, in parts.
template <class T>
struct listed_sums {
  T *data = nullptr, *errors = nullptr;  // [parts][keys][stride]; null: not wanted, not kept
  idx_t keys = 0, stride = 0, parts = 0;

  static listed_sums layout(arena& memory, bool wanted, idx_t keys, idx_t dim, idx_t parts, bool errors) {
    const idx_t stride = round_up(dim, width<T>), size = wanted ? parts * keys * stride : 0;
    listed_sums s{.keys = keys, .stride = stride, .parts = parts};
    if (wanted) s.data = memory.allocate<T>(size);
    if (wanted && errors) s.errors = memory.allocate<T>(size);
    return s;
  }
  void clear(idx_t part) const {
    for (T* x : {data, errors})
      if (x) std::fill_n(x + part * keys * stride, keys * stride, T(0));
  }
  /// Adds to the sums of key list[n] of a part those of weights[r][n] times row r, for R rows; weights of 0 are skipped
  /// unless all rows are finite.
  template <int R>
  void add(idx_t part, const idx_t* list, idx_t count, const T* weights, const padded_rows<T>& rows, idx_t first,
           bool finite) const {
    if (!data) return;
    T *const to = data + part * keys * stride, *const lost = errors ? errors + part * keys * stride : nullptr;
    for (idx_t n = 0; n < count; ++n) {
      const idx_t at = list[n] * stride;
      for (idx_t d = 0; d < stride; d += width<T>) {
        packet<T> sum = lost ? zero<T>() : load<T>(to + at + d);
        unroll<R>([&](auto r) {
          const T weight = weights[r * stream_tile + n];
          if (finite || weight != T(0)) sum = fma(broadcast<T>(weight), load<T>(rows.row(first + r) + d), sum);
        });
        if (lost) {
          packet<T> all = load<T>(to + at + d), error = load<T>(lost + at + d);
          add_compensated(all, error, sum);
          store<T>(lost + at + d, error), sum = all;
        }
        store<T>(to + at + d, sum);
      }
    }
  }
  /// Stores keys [begin, end), times `factor`, from the sums of the first `own` parts; from `real` on they are padding.
  template <class S>
  void store_rows(const matrix_view<S>& out, idx_t begin, idx_t end, idx_t real, idx_t own, T factor,
                  bool accumulate) const {
    for (idx_t part = 0; part < own && begin < (std::min)(end, real); ++part) {
      const idx_t from = (part * keys + begin) * stride, count = ((std::min)(end, real) - begin) * stride;
      if (errors) settle_compensated(data + from, errors + from, count, data + from);
      if (part > 0) sums_in_parts<T>{data, parts, keys, stride}.add_part(part, begin, (std::min)(end, real));
    }
    store_gradient_rows(data, stride, factor, out, begin, end, real, accumulate);
  }
};

}}}  // namespace attn::ATTN_ISA::detail
