// attn: what the streaming kernel (streaming.hpp) reads next, prefetched while it multiplies.
#pragma once

#include <attn/core/detail/prefetch.hpp>
#include <attn/core/detail/coded.hpp>

#include <utility>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Lines of some rows, fetched between the products with others: values during the scores, the next keys
/// during the output. They go to the second-level cache: products wait where they go to the first (Zen 4, four queries
/// of D 128: 1.7 times the time).
class stream_prefetcher {
 public:
  stream_prefetcher() = default;
  /// Rows [begin, end) of x.
  template <class S>
  stream_prefetcher(const matrix_view<S>& x, idx_t begin, idx_t end) {
    if (begin < end && x.col_stride == 1)
      set(x.row(begin), x.row_stride * idx_t(sizeof(S)), x.cols * idx_t(sizeof(S)), end - begin);
  }
  /// For rows in codes, their blocks take the place of rows.
  template <class Rows>
    requires requires(const Rows& x) { x.block_stride; }
  stream_prefetcher(const Rows& x, idx_t begin, idx_t end) {
    if (begin >= end || x.step != 1) return;
    constexpr idx_t of_block = row_format<std::remove_cvref_t<decltype(*x.block(0))>>::rows;
    const idx_t first = (x.first + begin) / of_block, blocks = (x.first + end - 1) / of_block - first + 1;
    set(x.block(begin), x.block_stride, x.layout.bytes(), blocks);
    if (!x.pages) return;
    // Pages take the place of rows, the last one to its end.
    const idx_t run = x.pages->run(first);
    begin_ = reinterpret_cast<const char*>(x.blocks), pages_ = x.pages->table + (first + run) / x.pages->blocks;
    end_ = at_ + (std::min)(run, blocks) * x.block_stride, gap_ = x.pages->stride;
    bytes_ = x.pages->blocks * x.block_stride, rows_ = 1 + ceil_div(std::max<idx_t>(0, blocks - run), x.pages->blocks);
  }

  /// The next `bytes` of them, or `nothing` where none are left. The caller prefetches them between its products: where
  /// many lines are fetched at once, processors wait.
  ATTN_INLINE const char* next(idx_t bytes, const void* nothing) {
    if (rows_ <= 0) return static_cast<const char*>(nothing);
    const char* const lines = at_;
    if ((at_ += bytes) >= end_ && --rows_ > 0) {
      at_ = pages_ ? begin_ + *pages_++ * gap_ : end_ + gap_;
      end_ = at_ + bytes_;
    }
    return lines;
  }
  /// Prefetches what is left of them.
  void fetch_all() {
    while (rows_ > 0) fetch(end_ - at_);
  }
  /// Prefetches the next `bytes`.
  void fetch(idx_t bytes) {
    if (rows_ > 0) prefetch_bytes<cache_level::second>(next(bytes, nullptr), bytes);
  }

 private:
  void set(const void* row, idx_t stride, idx_t bytes, idx_t rows) {
    if (stride == bytes) stride = bytes *= std::exchange(rows, 1);
    at_ = static_cast<const char*>(row), end_ = at_ + bytes, gap_ = stride - bytes, bytes_ = bytes, rows_ = rows;
  }

  const char *at_ = nullptr, *end_ = nullptr, *begin_ = nullptr;
  const idx_t* pages_ = nullptr;  // the next ones, gap_ apart
  idx_t gap_ = 0, bytes_ = 0, rows_ = 0;
};

}}}  // namespace attn::ATTN_ISA::detail
