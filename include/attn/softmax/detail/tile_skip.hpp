// attn: skip-softmax: which keys of a tile are left out, and the count of them.
#pragma once

#include <attn/core/detail/tile_product.hpp>
#include <attn/softmax/detail/score_loops.hpp>
#include <attn/softmax/skipped_tiles.hpp>

#include <bit>
#include <cmath>
#include <limits>
#include <optional>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Keys that the rows of a tile of the blockwise kernel leave out together.
inline constexpr idx_t skip_keys = 64;

/// What the options of a call say, and the limit of one batch item.
template <class T>
struct tile_skip {
  std::optional<T> below{}, share{};
  skipped_tiles* counts = nullptr;
  T limit = T(-1);  // in base 2; negative without the options, infinity where all that it leaves out is 0

  /// Whether the options leave out anything.
  bool given() const { return below || share; }
  explicit operator bool() const { return limit >= T(0); }
  bool leaves_out() const { return limit >= T(0) && limit != std::numeric_limits<T>::infinity(); }

  tile_skip of_item(idx_t keys) const {
    tile_skip one = *this;
    if (below) one.limit = *below * log2_e<T>;
    if (share) one.limit = (std::max)(T(0), std::log2(static_cast<T>(keys) / *share));
    if (one.limit >= T(-std::numeric_limits<T>::min_exponent)) one.limit = std::numeric_limits<T>::infinity();
    return one;
  }
  /// Adds to the counts; called by several threads at once. (libc++ has no std::atomic_ref before 19.)
  void count(idx_t seen, idx_t skipped) const {
    if (!counts || seen == 0) return;
    __atomic_fetch_add(&counts->seen, seen, __ATOMIC_RELAXED);
    __atomic_fetch_add(&counts->skipped, skipped, __ATOMIC_RELAXED);
  }
};

/// Whether one of `count` scores, in whole vectors, times `factor`, is `least` or more, or not a number.
template <class T>
ATTN_INLINE bool any_reaches(const T* s, idx_t count, T factor, T least) {
  const packet<T> limit = broadcast<T>(least), times = broadcast<T>(factor), one = broadcast<T>(T(1));
  packet<T> reached = zero<T>();
  for (idx_t n = 0; n < count; n += width<T>)
    reached = (max)(reached, if_less(mul(load<T>(s + n), times), limit, zero<T>(), one));
  return max_lanes(reached) > T(0);
}

/// Which blocks of skip_keys keys of a tile are kept: bit n is that of block n.
struct kept_blocks {
  std::uint32_t bits = ~0u;

  /// Of rows of scores `stride` apart, in base 2 once multiplied by `factor`. A row keeps what reaches its entry of
  /// `least`.
  template <class T>
  [[gnu::noinline]] static kept_blocks of(const T* s, idx_t stride, idx_t rows, idx_t count, T factor,
                                          const T* least) {
    kept_blocks kept{0};
    for (idx_t n = 0, block = 0; n < count; n += skip_keys, ++block)
      for (idx_t m = 0; m < rows; ++m)
        if (any_reaches(s + m * stride + n, (std::min)(skip_keys, count - n), factor, least[m])) {
          kept.bits |= 1u << block;
          break;
        }
    return kept;
  }
  static std::uint32_t all_of(idx_t count) { return (1u << ceil_div(count, skip_keys)) - 1; }

  /// Whether a block is kept that has slots of [begin, end).
  bool any(idx_t begin, idx_t end) const {
    return (bits >> begin / skip_keys & ((2u << ((end - 1) / skip_keys - begin / skip_keys)) - 1)) != 0;
  }
  idx_t left_out(idx_t count) const { return std::popcount(~bits & all_of(count)); }
  /// Whether all of so many slots are kept, or none.
  bool all(idx_t count) const { return left_out(count) == 0; }
  bool none(idx_t count) const { return (bits & all_of(count)) == 0; }

  /// visit(begin, end, kept) for the longest runs of slots that are all kept or all left out.
  template <class Visit>
  void for_each_run(idx_t count, const Visit& visit) const {
    for (idx_t begin = 0, end; begin < count; begin = end) {
      const bool kept = any(begin, begin + 1);
      end = begin;
      do end = (std::min)(end + skip_keys, count);
      while (end < count && any(end, end + 1) == kept);
      visit(begin, end, kept);
    }
  }
};

}}}  // namespace attn::ATTN_ISA::detail
