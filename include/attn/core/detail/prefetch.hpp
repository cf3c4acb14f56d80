// attn: rows fetched before they are needed. The one prefetcher of the library: for the streaming kernel, Nystrom, lsh
// and patterns of the softmax family, and for the kernel family.
#pragma once

#include <attn/core/detail/quantised.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Which cache a row is fetched into: the first for what is used next, the second for what is used in a while.
enum class cache_level { first, second };

template <cache_level Level = cache_level::second>
inline void prefetch_bytes(const char* p, idx_t bytes) {
  for (idx_t at = 0; at < bytes; at += 64) __builtin_prefetch(p + at, 0, Level == cache_level::first ? 3 : 2);
}

/// Row i of x; i may be out of range. For rows in no regular order.
template <class Rows>
void prefetch_row(const Rows& x, idx_t i) {
  prefetch_bytes(reinterpret_cast<const char*>(x.row(i)), x.cols * static_cast<idx_t>(sizeof(*x.row(i))));
}

/// Rows of up to `Streams` matrices, fetched a few at a time between other work: the processor does not predict several
/// memory streams that alternate.
template <int Streams = 5, cache_level Level = cache_level::second>
class row_prefetcher {
 public:
  row_prefetcher() = default;
  template <class Rows>
  row_prefetcher(const Rows& x, idx_t begin, idx_t end) {
    add(x, begin, end);
  }

  /// Rows [begin, end) of x.
  template <class S>
  void add(const matrix_view<S>& x, idx_t begin, idx_t end) {
    if (begin >= end || x.col_stride != 1) return;
    streams_[count_++] = {reinterpret_cast<const char*>(x.row(begin)), x.row_stride * static_cast<idx_t>(sizeof(S)),
                          x.cols * static_cast<idx_t>(sizeof(S)), end - begin};
  }
  /// For rows in eight bits, their blocks take the place of rows.
  void add(const quantised_rows& x, idx_t begin, idx_t end) {
    if (begin >= end || x.step != 1) return;
    streams_[count_++] = {reinterpret_cast<const char*>(x.block(begin)), x.block_stride, x.layout.bytes(),
                          (x.first + end - 1) / quantised_block - (x.first + begin) / quantised_block + 1};
  }

  /// The next `rows` rows of every matrix.
  void next(idx_t rows) {
    for (int n = 0; n < Streams; ++n) {
      stream& s = streams_[n];
      for (idx_t r = std::min(rows, s.rows); r > 0; --r, --s.rows, s.row += s.stride)
        prefetch_bytes<Level>(s.row, s.bytes);
    }
  }

 private:
  struct stream {
    const char* row = nullptr;
    idx_t stride = 0, bytes = 0, rows = 0;
  };
  stream streams_[Streams];
  int count_ = 0;
};

}}}  // namespace attn::ATTN_ISA::detail
