// attn: rows of a list, as the streaming kernel (streaming.hpp) reads them, and what it prefetches of any rows.
#pragma once

#include <attn/core/detail/cache_rows.hpp>
#include <attn/core/detail/coded.hpp>
#include <attn/softmax/detail/stream_prefetcher.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Rows of elements C in a tile, at most: two such tiles of dim 64 fit in a first-level cache of 32 KiB. (For elements
/// of one byte 256 rows were measured: 0.92 of the time with 128.)
template <class C>
inline constexpr idx_t stream_tile_of = sizeof(C) == 1 ? 256 : sizeof(C) <= 2 ? 128 : 64;
inline constexpr idx_t stream_tile = 256;  // the largest

/// Rows in any order: row n is at at[n].
template <class S>
struct listed_rows {
  const S* const* at = nullptr;
  idx_t rows = 0, cols = 0, col_stride = 1;

  const S* row(idx_t n) const { return at[n]; }
};
/// The same in codes. Runs of adjacent rows, those of a list of blocks, are tiles of their own.
template <class C>
struct listed_codes {
  static constexpr idx_t least_run = 16;

  const cache_rows<const C>* of = nullptr;
  const idx_t* list = nullptr;
  idx_t rows = 0, cols = 0;

  void expand(idx_t begin, idx_t end, float* to, idx_t stride) const {
    for (idx_t n = begin; n < end; ++n, to += stride) of->from(list[n]).expand(0, 1, to, stride);
  }
  const C* block(idx_t n) const { return of->from(list[n]).block(0); }
  idx_t in_block(idx_t n) const { return of->from(list[n]).in_block(0); }
  /// Whether row n follows the one before. Runs end where a tile of all rows does.
  bool follows(idx_t n) const { return list[n] == list[n - 1] + 1 && list[n] % stream_tile != 0; }
  /// Whether the first `count` rows are a run.
  bool adjacent(idx_t count) const {
    return count >= least_run && list[count - 1] - list[0] == count - 1 &&
           list[0] / stream_tile == list[count - 1] / stream_tile && of->from(list[0]).rows >= count;
  }
  /// How many of the first `count` rows are a run, or come before the next one, and are alike.
  idx_t alike(idx_t count) const {
    const bool tail = in_tail(of->from(list[0]));
    for (idx_t n = 1, run = 1; n < count; ++n) {
      if (channel_coded<C> && in_tail(of->from(list[n])) != tail) return n;
      run = follows(n) ? run + 1 : 1;
      if (run < least_run) continue;
      if (n + 1 > run) return n + 1 - run;
      while (n + 1 < count && follows(n + 1)) ++n;
      const auto from_first = of->from(list[0]);
      return alike_of(from_first, (std::min)(n + 1, from_first.rows));
    }
    return count;
  }
};
/// Fetches some of them, as stream_prefetcher does, but only between the products with weights, and to the first-level
/// cache: no processor fetches rows in no order by itself, and those of a list often are in the second one already.
template <class S>
struct listed_prefetcher {
  const S* const* at = nullptr;
  idx_t rows = 0, bytes = 0, done = 0;

  const char* next(idx_t some, const void* nothing) {
    if (rows <= 0) return static_cast<const char*>(nothing);
    const char* const lines = reinterpret_cast<const char*>(*at) + done;
    if ((done += some) >= bytes) done = 0, ++at, --rows;
    return lines;
  }
  void fetch_all() {
    for (; rows > 0; --rows) prefetch_bytes<cache_level::second>(reinterpret_cast<const char*>(*at++), bytes);
  }
};
template <class>
inline constexpr bool fetches_listed_rows = false;
template <class S>
inline constexpr bool fetches_listed_rows<listed_prefetcher<S>> = true;

/// Whether both are the same rows, which then need no prefetching twice.
template <class K, class V>
bool same_rows(const K&, const V&) {
  return false;
}
template <class S>
bool same_rows(const listed_rows<S>& a, const listed_rows<S>& b) {
  return a.at == b.at;
}

struct prefetch_nothing {
  const char* next(idx_t, const void* nothing) const { return static_cast<const char*>(nothing); }
  void fetch_all() const {}
};
template <class C>
idx_t alike(const listed_codes<C>& x, idx_t count) {
  return x.alike(count);
}

template <class Rows>
stream_prefetcher prefetcher_of(const Rows& x, idx_t begin, idx_t end) {
  return {x, begin, end};
}
template <class S>
listed_prefetcher<S> prefetcher_of(const listed_rows<S>& x, idx_t begin, idx_t end) {
  if (begin >= end || x.col_stride != 1) return {};
  return {x.at + begin, end - begin, x.cols * static_cast<idx_t>(sizeof(S))};
}
template <class C>
stream_prefetcher prefetcher_of(const listed_codes<C>&, idx_t, idx_t) {
  return {};
}

/// Prefetches the next `bytes` between products with weights; `nothing` as for next().
template <class Prefetcher>
ATTN_INLINE void prefetch_next(Prefetcher& rows, idx_t bytes, const void* nothing) {
  prefetch_bytes(rows.next(bytes, nothing), bytes);
}
template <class S>
ATTN_INLINE void prefetch_next(listed_prefetcher<S>& rows, idx_t bytes, const void* nothing) {
  prefetch_bytes<cache_level::first>(rows.next(bytes, nothing), bytes);
}

}}}  // namespace attn::ATTN_ISA::detail
