// attn: the keys of a query with the largest scores, which come a few at a time in the order of the keys.
//
// Scores above a threshold are kept, in that order. When there are too many, the topk-th largest is found by a
// quickselect without branches on the numbers (std::nth_element: 3 times as long), becomes the threshold, and those
// below are dropped. A candidate is its score and its key as one number, so that of equal scores the earlier key is the
// larger one.
#pragma once

#include <attn/core/detail/simd.hpp>
#include <attn/core/execution.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// NaN counts as -infinity, -0 as 0.
template <class T>
struct candidate {
  using bits = std::uint64_t;
  static constexpr idx_t most_keys = idx_t(1) << 60;

  bits order = 0, before = 0;  // larger ones come first

  candidate() = default;
  candidate(T score, idx_t key) : order(ordered(score)), before(~static_cast<bits>(key)) {}
  idx_t key() const { return static_cast<idx_t>(~before); }
  T score() const { return std::bit_cast<T>(order >> 63 ? order ^ bits(1) << 63 : ~order); }
  friend bool operator<(const candidate& a, const candidate& b) {
    return a.order < b.order || (a.order == b.order && a.before < b.before);
  }

  static bits ordered(T score) {
    const bits x = std::bit_cast<bits>(score == score ? score + T(0) : -std::numeric_limits<T>::infinity());
    return x >> 63 ? ~x : x | bits(1) << 63;
  }
};
template <>
struct candidate<float> {
  static constexpr idx_t most_keys = idx_t(1) << 32;

  std::uint64_t number = 0;

  candidate() = default;
  candidate(float score, idx_t key) : number(ordered(score) << 32 | static_cast<std::uint32_t>(~key)) {}
  idx_t key() const { return static_cast<idx_t>(static_cast<std::uint32_t>(~number)); }
  float score() const {
    const std::uint32_t x = static_cast<std::uint32_t>(number >> 32);
    return std::bit_cast<float>(x >> 31 ? x ^ 0x80000000u : ~x);
  }
  friend bool operator<(const candidate& a, const candidate& b) { return a.number < b.number; }

  static std::uint64_t ordered(float score) {
    const std::uint32_t x = std::bit_cast<std::uint32_t>(score == score ? score + 0.0f
                                                                        : -std::numeric_limits<float>::infinity());
    return x ^ ((0u - (x >> 31)) | 0x80000000u);
  }
};

/// The `k`-th largest of `count` different candidates, 1 <= k <= count. upper and lower [count] are scratch.
template <class T>
candidate<T> kth_largest(const candidate<T>* from, idx_t count, idx_t k, candidate<T>* upper, candidate<T>* lower) {
  for (;;) {
    for (idx_t n = 0; count <= 8 && n < count; ++n) {
      idx_t larger = 0;
      for (idx_t m = 0; m < count; ++m) larger += from[n] < from[m];
      if (larger + 1 == k) return from[n];
    }
    const auto middle = [&](idx_t a, idx_t b, idx_t c) {
      return (std::max)((std::min)(from[a], from[b]), (std::min)((std::max)(from[a], from[b]), from[c]));
    };
    const candidate<T> of_three[] = {middle(0, count / 8, count / 4), middle(count * 3 / 8, count / 2, count * 5 / 8),
                                     middle(count * 3 / 4, count * 7 / 8, count - 1)};
    const candidate<T> pivot = (std::max)((std::min)(of_three[0], of_three[1]),
                                        (std::min)((std::max)(of_three[0], of_three[1]), of_three[2]));
    // `from` may be upper or lower: what is written never passes what is read.
    idx_t above = 0, below = 0;
    for (idx_t n = 0; n < count; ++n) {
      const candidate<T> x = from[n];
      const bool larger = pivot < x;
      upper[above] = x, above += larger;
      lower[below] = x, below += !larger;
    }
    if (k <= above)
      from = upper, count = above;
    else
      from = lower, count = below, k -= above;
  }
}

/// Of one query.
template <class T>
struct topk_keys {
  candidate<T> *list = nullptr, *upper = nullptr, *lower = nullptr;  // [room_for(..)]; the last two may be shared
  idx_t topk = 0, capacity = 0, count = 0;  // of more than `capacity` candidates some are dropped
  T threshold = -std::numeric_limits<T>::infinity();  // keys of scores that are not above it are not wanted
  bool full = false;                                  // whether there are so many

  static idx_t capacity_of(idx_t topk, idx_t keys) { return (std::min)(std::max<idx_t>(4 * topk, 256), keys); }
  static idx_t room_for(idx_t topk, idx_t keys) { return capacity_of(topk, keys) + width<T>; }

  static topk_keys layout(arena& memory, idx_t topk, idx_t keys, candidate<T>* upper, candidate<T>* lower) {
    return {.list = memory.allocate<candidate<T>>(room_for(topk, keys)), .upper = upper, .lower = lower, .topk = topk,
            .capacity = capacity_of(topk, keys)};
  }
  void clear() { count = 0, full = false, threshold = -std::numeric_limits<T>::infinity(); }

  /// The scores of `some` keys from `first` on.
  void take(const T* scores, idx_t first, idx_t some) {
    idx_t n = 0;
    for (; n < some && !full; ++n) {
      list[count++] = {scores[n], first + n};
      if (count >= capacity && count > topk) drop();
    }
    for (; n + width<T> <= some; n += width<T>)
      if (max_lanes(above(load<T>(scores + n))) > T(0)) add_some(scores + n, first + n, width<T>);
    if (n < some) add_some(scores + n, first + n, some - n);
  }
  /// The candidates of a list of later keys.
  void merge(const topk_keys& later) {
    for (idx_t n = 0; n < later.count; ++n) {
      list[count++] = later.list[n];
      if (count >= capacity && count > topk) drop();
    }
  }
  /// The topk best, in the order of keys: list[0], ..., list[count - 1].
  void finish() {
    if (count > topk) drop();
  }

 private:
  /// 1 where a score is above the threshold.
  packet<T> above(const packet<T>& x) const {
    return if_less(broadcast<T>(threshold), x, broadcast<T>(T(1)), zero<T>());
  }
  void add_some(const T* scores, idx_t first, idx_t some) {
    for (idx_t n = 0; n < some; ++n) {  // without branches: which ones are above cannot be predicted
      list[count] = {scores[n], first + n};
      count += scores[n] > threshold;
    }
    if (count >= capacity) drop();
  }
  [[gnu::noinline]] void drop() {
    const idx_t all = std::exchange(count, 0);
    const candidate<T> least = kth_largest(list, all, topk, upper, lower);
    for (idx_t n = 0; n < all; ++n) {
      const candidate<T> x = list[n];
      list[count] = x, count += !(x < least);
    }
    threshold = least.score(), full = true;
  }
};

}}}  // namespace attn::ATTN_ISA::detail
