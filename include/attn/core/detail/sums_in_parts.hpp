// attn: sums over many rows, in parts that are computed separately and then added up in order. Parts depend on the
// shape only, so that the number of threads changes no bit.
#pragma once

#include <attn/core/detail/tile_product.hpp>
#include <attn/core/execution.hpp>

#include <algorithm>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Into how many parts sums over `rows` rows are divided: `most` at most, of at least `least` rows each.
constexpr idx_t parts_of(idx_t rows, idx_t most, idx_t least = 2048) {
  return std::clamp<idx_t>(rows / least, 1, most);
}

/// Stride of the rows of sums, in numbers.
template <class T>
idx_t sums_stride(idx_t dim) {
  return round_up(dim, panel_width<T>);
}

template <class T>
struct sums_in_parts {
  T* data = nullptr;
  idx_t parts = 0, rows = 0, stride = 0;

  static sums_in_parts layout(arena& memory, idx_t parts, idx_t rows, idx_t dim) {
    const idx_t stride = sums_stride<T>(dim);
    return {memory.allocate<T>(parts * rows * stride), parts, rows, stride};
  }
  T* part(idx_t n) const { return data + n * rows * stride; }
  T* row(idx_t r) const { return data + r * stride; }
  void clear(idx_t n) const { clear(n, rows); }
  /// The first `count` rows of part n.
  void clear(idx_t n, idx_t count) const { std::fill_n(part(n), (std::min)(count, rows) * stride, T(0)); }
  /// Adds rows [begin, end) of part n to those of the first.
  void add_part(idx_t n, idx_t begin, idx_t end) const {
    const T* const from = part(n);
    for (idx_t x = begin * stride; x < end * stride; x += width<T>)
      store<T>(data + x, add(load<T>(data + x), load<T>(from + x)));
  }
  /// The first part becomes factor times the sum of all.
  void merge(T factor) const { merge(factor, rows); }
  void merge(T factor, idx_t count) const {
    for (idx_t n = 1; n < parts; ++n) add_part(n, 0, count);
    for (idx_t x = 0; x < count * stride; ++x) data[x] *= factor;
  }
};

}}}  // namespace attn::ATTN_ISA::detail
