// attn: rows of keys or values, one after another or in pages.
#pragma once

#include <attn/core/tensor_view.hpp>

#include <vector>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The location of rows in pages of a pool: row j of item b is row j % page_rows of page tables[b][j / page_rows].
struct page_tables {
  const std::vector<idx_t>* tables = nullptr;
  idx_t page_rows = 0;

  explicit operator bool() const { return tables != nullptr; }
};

/// Rows of one head, one after another or in pages; of elements that are codes: kv_memory.hpp.
template <class S>
struct cache_rows {
  S* data = nullptr;
  idx_t rows = 0, cols = 0, row_stride = 0, col_stride = 1;
  const idx_t* pages = nullptr;
  idx_t page_rows = 0, page_stride = 0;

  explicit cache_rows(const matrix_view<S>& x)
      : data(x.data), rows(x.rows), cols(x.cols), row_stride(x.row_stride), col_stride(x.col_stride) {}

  /// Of a batch item and head of x, which is [B, H, rows, D], or [pages, H, page_rows, D].
  [[gnu::noinline]] cache_rows(const tensor_view<S>& x, idx_t b, idx_t h, idx_t, bool, const page_tables& given)
      : data(x.data()), rows(x.extent(2)), cols(x.extent(3)), row_stride(x.stride(2)), col_stride(x.stride(3)) {
    if (!data) row_stride = 0;  // as head_of(), whose view would be copied
    if (data) data += (given ? 0 : b) * x.stride(0) + h * x.stride(1);
    if (!given) return;
    const std::vector<idx_t>& table = given.tables[b];
    pages = table.data(), page_rows = given.page_rows, page_stride = x.stride(0);
    rows = std::ssize(table) * page_rows;
  }

  S* row(idx_t j) const {
    return pages ? data + pages[j / page_rows] * page_stride + j % page_rows * row_stride : data + j * row_stride;
  }
  /// Whether rows of both are in the same places, as those of values that are the keys.
  bool same_places(const cache_rows& x) const {
    return data == x.data && row_stride == x.row_stride && pages == x.pages && page_stride == x.page_stride;
  }
  /// The contiguous rows from j on.
  matrix_view<S> from(idx_t j) const {
    const idx_t count = pages ? page_rows - j % page_rows : rows - j;
    return {row(j), count, cols, row_stride, col_stride};
  }
};

}}}  // namespace attn::ATTN_ISA::detail
