// attn: rows fetched before they are needed: some at a time for the streaming kernel, Nystrom, lsh and patterns of the
// softmax family, the kernel family and weights of layers; line by line for the blockwise kernel.
#pragma once

#include <attn/core/detail/cache_rows.hpp>
#include <attn/core/detail/coded.hpp>
#include <attn/core/detail/pages.hpp>
#include <attn/core/detail/unit_product.hpp>

#include <bit>
#include <limits>
#include <type_traits>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Which cache a row is fetched into: the first for what is used next, the second for what is used in a while.
enum class cache_level { first, second };

template <cache_level Level = cache_level::second>
ATTN_INLINE void prefetch_bytes(const char* p, idx_t bytes) {
  __asm__ volatile("");  // an effect: GCC leaves out calls of a function that only prefetches, as if it had none
  for (idx_t at = 0; at < bytes; at += 64) __builtin_prefetch(p + at, 0, Level == cache_level::first ? 3 : 2);
}

/// Row i of x; i may be out of range. For rows in no regular order. Rows that are made when they are asked for, which
/// have no `cols`, are not fetched.
template <class Rows>
ATTN_INLINE void prefetch_row(const Rows& x, idx_t i) {
  if constexpr (requires { x.cols; })
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
  /// For rows in codes, their blocks take the place of rows.
  template <class Rows>
    requires requires(const Rows& x) { x.block_stride; }
  void add(const Rows& x, idx_t begin, idx_t end) {
    if (begin >= end || x.step != 1) return;
    constexpr idx_t of_block = row_format<std::remove_cvref_t<decltype(*x.block(0))>>::rows;
    streams_[count_++] = {reinterpret_cast<const char*>(x.block(begin)), x.block_stride, x.layout.bytes(),
                          (x.first + end - 1) / of_block - (x.first + begin) / of_block + 1};
  }

  /// The next `rows` rows of every matrix.
  void next(idx_t rows) {
    for (int n = 0; n < Streams; ++n) {
      stream& s = streams_[n];
      for (idx_t r = (std::min)(rows, s.rows); r > 0; --r, --s.rows, s.row += s.stride)
        prefetch_bytes<Level>(s.row, s.bytes);
    }
  }

 private:
  struct stream {
    const char* row = nullptr;
    idx_t stride = 0, bytes = 0, rows = 0;
  };
  stream streams_[array_size<Streams>];
  int count_ = 0;
};

/// Rows of up to four matrices, fetched line by line between the multiply-adds of products. (full_softmax_step, 8
/// tokens: 0.74 of the time of fetching them between the tiles, because processors wait where too many lines are on
/// their way.)
class line_prefetcher {
 public:
  /// Rows [begin, end) of x, or of a cache.
  template <class C>
  void add(const cache_rows<C>& x, idx_t begin, idx_t end = 0) {
    constexpr idx_t size = sizeof(C);
    stream& s = streams_[count_++];
    s.rows = cache_rows<const char>(matrix_view<const char>{reinterpret_cast<const char*>(x.data), x.rows,
                                                            x.cols * size, x.row_stride * size, 1});
    s.rows.pages = x.pages, s.rows.page_rows = x.page_rows, s.rows.page_stride = x.page_stride * size;
    s.at = x.col_stride == 1 ? begin : (std::numeric_limits<idx_t>::max)(), s.end = end, any_left_ = true;
  }
  template <class S>
  void add(const matrix_view<S>& x, idx_t begin, idx_t end) {
    add(cache_rows<S>(x), begin, end);
  }

  explicit operator bool() const { return count_ > 0; }
  /// Lines are fetched of the rows before `end` alone.
  void set_end(idx_t end) {
    for (int n = 0; n < count_; ++n) streams_[n].end = end;
    any_left_ = true;
  }
  /// Fetches the rows before `end` that are still missing.
  void fetch(idx_t end) {
    for (stream* s = streams_; s < streams_ + count_; ++s)
      for (; s->at < (std::min)(end, s->end); ++s->at) prefetch_row(s->rows, s->at);
  }
  /// Up to `count` lines, the next ones of the matrices in turn.
  prefetched_lines next(idx_t count) { return any_left_ ? next_of_any(count) : prefetched_lines{}; }

 private:
  [[gnu::noinline]] prefetched_lines next_of_any(idx_t count) {
    for (int n = 0; n < count_; ++n)
      if (stream& s = streams_[turn_++ % static_cast<unsigned>(count_)]; s.at < s.end) return s.next(count);
    any_left_ = false;
    return {};
  }

  struct stream {
    cache_rows<const char> rows{matrix_view<const char>{}};
    idx_t at = 0, end = 0;

    prefetched_lines next(idx_t count) {
      constexpr idx_t line = cache_line;
      const matrix_view<const char> some = rows.from(at);
      const idx_t most = (std::min)(some.rows, end - at);
      prefetched_lines lines{some.data, count, some.row_stride};
      if (some.row_stride == some.cols) {
        lines.stride = line;
        const idx_t taken = std::clamp<idx_t>(count * line / std::max<idx_t>(1, some.cols), 1, most);
        lines.count = (std::min)(count, ceil_div(taken * some.cols, line));
        at += taken;
      } else {
        const auto of_row = std::bit_ceil(static_cast<std::size_t>(ceil_div(some.cols, line)));
        lines.shift = std::countr_zero(of_row), lines.in_row = static_cast<idx_t>(of_row) - 1;
        const idx_t taken = std::clamp<idx_t>(count >> lines.shift, 1, most);
        lines.count = (std::min)(count, taken << lines.shift);
        at += taken;
      }
      return lines;
    }
  };

  stream streams_[4];
  int count_ = 0;
  unsigned turn_ = 0;
  bool any_left_ = false;
};

}}}  // namespace attn::ATTN_ISA::detail
