// attn: the keys of a query with the largest scores, which come a few at a time in the order of the keys.
//
// Scores above a threshold are kept, in that order. When there are too many, the topk-th largest is found by a
// quickselect without branches on the numbers (std::nth_element: 3 times as long), becomes the threshold, and those
// below are dropped. A candidate is its score and its key as one number, so that of equal scores the earlier key is the
// larger one.
#pragma once

#include <attn/core/detail/simd.hpp>
#include <attn/core/execution.hpp>

#include <bit>
#include <limits>

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

/// Copies to `upper` the candidates above the pivot, to `lower` the others. Either may be `from`: what is written never
/// passes what is read. Returns how many are above.
template <class T>
idx_t split(const candidate<T>* from, idx_t count, const candidate<T>& pivot, candidate<T>* upper,
            candidate<T>* lower) {
  idx_t above = 0, below = 0;
  for (idx_t n = 0; n < count; ++n) {
    const candidate<T> x = from[n];
    const bool larger = pivot < x;
    upper[above] = x, above += larger;
    lower[below] = x, below += !larger;
  }
  return above;
}
/// Removes those below the pivot. Returns how many are left.
template <class T>
idx_t keep_from(candidate<T>* list, idx_t all, const candidate<T>& pivot) {
  idx_t count = 0;
  for (idx_t n = 0; n < all; ++n) {
    const candidate<T> x = list[n];
    list[count] = x, count += !(x < pivot);
  }
  return count;
}

// The same, and candidates of scores, where the processor moves chosen lanes together (4096 keys, topk 512, Zen 4:
// choosing takes half the time).
#if defined(__AVX512F__) && defined(EIGEN_VECTORIZE_AVX512)
/// Eight of them, of which those of `real` count; up to seven numbers behind what is written change.
struct eight_candidates {
  __m512i numbers;
  __mmask8 real;

  static eight_candidates load(const candidate<float>* from, idx_t count) {
    const __mmask8 real = static_cast<__mmask8>(count < 8 ? (1u << count) - 1 : 0xffu);
    return {_mm512_maskz_loadu_epi64(real, from), real};
  }
  idx_t store(candidate<float>* to, __mmask8 these) const {
    _mm512_storeu_si512(to, _mm512_maskz_compress_epi64(these, numbers));
    return std::popcount(static_cast<unsigned>(these));
  }
};
inline idx_t split(const candidate<float>* from, idx_t count, const candidate<float>& pivot, candidate<float>* upper,
                   candidate<float>* lower) {
  const __m512i limit = _mm512_set1_epi64(static_cast<long long>(pivot.number));
  idx_t above = 0, below = 0;
  for (idx_t n = 0; n < count; n += 8) {
    const auto x = eight_candidates::load(from + n, count - n);
    const __mmask8 larger = _mm512_mask_cmpgt_epu64_mask(x.real, x.numbers, limit);
    above += x.store(upper + above, larger);
    below += x.store(lower + below, static_cast<__mmask8>(x.real & ~larger));
  }
  return above;
}
inline idx_t keep_from(candidate<float>* list, idx_t all, const candidate<float>& pivot) {
  const __m512i limit = _mm512_set1_epi64(static_cast<long long>(pivot.number));
  idx_t count = 0;
  for (idx_t n = 0; n < all; n += 8) {
    const auto x = eight_candidates::load(list + n, all - n);
    count += x.store(list + count, _mm512_mask_cmpge_epu64_mask(x.real, x.numbers, limit));
  }
  return count;
}
/// Appends those of the first `some` scores, of 16 at most, that are above the threshold, or all of them.
inline idx_t append_candidates(const float* scores, idx_t some, idx_t first, bool all, float threshold,
                               candidate<float>* to) {
  const __mmask16 real = static_cast<__mmask16>(some < 16 ? (1u << some) - 1 : 0xffffu);
  __m512 x = _mm512_maskz_loadu_ps(real, scores);
  const __mmask16 these = all ? real : _mm512_mask_cmp_ps_mask(real, x, _mm512_set1_ps(threshold), _CMP_GT_OQ);
  if (these == 0) return 0;
  const __m512 lowest = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  x = _mm512_mask_mov_ps(_mm512_add_ps(x, _mm512_setzero_ps()), _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), lowest);
  const __m512i bits = _mm512_castps_si512(x), sign = _mm512_set1_epi32(std::numeric_limits<int>::min());
  const __m512i ordered = _mm512_xor_si512(bits, _mm512_or_si512(_mm512_srai_epi32(bits, 31), sign));
  const auto eight = [&](__m256i half, idx_t key) {
    const __m512i before = _mm512_sub_epi64(_mm512_set1_epi64(static_cast<std::uint32_t>(~key)),
                                            _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0));
    return _mm512_or_si512(_mm512_slli_epi64(_mm512_cvtepu32_epi64(half), 32), before);
  };
  const eight_candidates low{eight(_mm512_castsi512_si256(ordered), first), 0xff},
      high{eight(_mm512_extracti64x4_epi64(ordered, 1), first + 8), 0xff};
  const idx_t count = low.store(to, static_cast<__mmask8>(these));
  return count + high.store(to + count, static_cast<__mmask8>(these >> 8));
}
#endif

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
    const idx_t above = split(from, count, pivot, upper, lower);
    if (k <= above)
      from = upper, count = above;
    else
      from = lower, count -= above, k -= above;
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
#if defined(__AVX512F__) && defined(EIGEN_VECTORIZE_AVX512)
    if constexpr (std::same_as<T, float>) {
      for (; n < some; n += 16) {
        count += append_candidates(scores + n, some - n, first + n, !full, threshold, list + count);
        if (count >= capacity && count > topk) drop();
      }
      return;
    }
#endif
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
    count = keep_from(list, all, least);
    threshold = least.score(), full = true;
  }
};

}}}  // namespace attn::ATTN_ISA::detail
