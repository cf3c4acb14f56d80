// attn: the keys of a query with the largest scores, which come a few at a time in the order of the keys.
//
// Scores above a threshold are kept, in that order, beside their keys. When there are too many, the topk-th largest is
// found by a quickselect without branches on the numbers (std::nth_element: 3 times as long), becomes the threshold,
// and those below are dropped. Of equal scores the earlier keys are kept.
#pragma once

#include <attn/core/detail/simd.hpp>
#include <attn/core/execution.hpp>

#include <bit>
#include <limits>

namespace attn { inline namespace ATTN_ISA { namespace detail {

using key_number = std::uint32_t;

/// A key and its score. NaN counts as -infinity, -0 as 0; of equal scores that of the later key is less.
template <class T>
class candidate {
 public:
  static constexpr idx_t most_keys = idx_t(1) << 32;

  candidate() = default;
  candidate(T score, idx_t key) : score_(counted(score)), key_(static_cast<key_number>(key)) {}
  idx_t key() const { return static_cast<idx_t>(key_); }
  T score() const { return score_; }
  friend bool operator<(const candidate& a, const candidate& b) {
    return a.score_ < b.score_ || (a.score_ == b.score_ && a.key_ > b.key_);
  }

  static T counted(T score) { return score == score ? score + T(0) : -std::numeric_limits<T>::infinity(); }

 private:
  T score_ = 0;
  key_number key_ = 0;
};

enum class side { above, below };

/// Copies to `to`, which may be `from`, the numbers on one side of the pivot. Returns how many.
template <side Side, class T>
idx_t part_of(const T* from, idx_t count, T pivot, T* to) {
  idx_t found = 0;
  for (idx_t n = 0; n < count; ++n) {
    const T x = from[n];
    to[found] = x, found += Side == side::above ? x > pivot : x < pivot;
  }
  return found;
}
/// A number among `count` that is about the k-th largest; of a few, the k-th largest.
template <class T>
T pivot_of(const T* from, idx_t count, idx_t k) {
  for (idx_t n = 0; count <= 8 && n < count; ++n) {
    idx_t larger = 0, equal = 0;
    for (idx_t m = 0; m < count; ++m) larger += from[n] < from[m], equal += from[n] == from[m];
    if (larger < k && k <= larger + equal) return from[n];
  }
  const auto median = [](T a, T b, T c) { return (std::max)((std::min)(a, b), (std::min)((std::max)(a, b), c)); };
  const auto middle = [&](idx_t a, idx_t b, idx_t c) { return median(from[a], from[b], from[c]); };
  return median(middle(0, count / 8, count / 4), middle(count * 3 / 8, count / 2, count * 5 / 8),
                middle(count * 3 / 4, count * 7 / 8, count - 1));
}
/// Scores that are to be added to a list with their keys, from `first` on: those above the threshold, or all. `scores`
/// and `keys` have room for all of them. Returns how many.
template <class T>
idx_t append_keys(const T* from, idx_t some, idx_t first, bool all, T threshold, T* scores, key_number* keys) {
  const auto any = [&](idx_t n) {
    const packet<T> x = load<T>(from + n), one = broadcast<T>(T(1));
    return max_lanes(if_less(broadcast<T>(threshold), x, one, zero<T>())) > T(0);
  };
  idx_t count = 0;
  for (idx_t n = 0, end; n < some; n = end) {
    end = (std::min)(n + width<T>, some);
    if (!all && end == n + width<T> && !any(n)) continue;
    for (; n < end; ++n) {  // without branches: which ones are above cannot be predicted
      scores[count] = candidate<T>::counted(from[n]), keys[count] = static_cast<key_number>(first + n);
      count += all | (from[n] > threshold);
    }
  }
  return count;
}
/// Removes the scores below the least, and all but the first `equal` of those that equal it. Returns how many are left.
template <class T>
idx_t keep_from(T* scores, key_number* keys, idx_t all, T least, idx_t equal) {
  idx_t count = 0;
  for (idx_t n = 0; n < all; ++n) {
    const T x = scores[n];
    const bool another = (x == least) & (equal > 0);
    scores[count] = x, keys[count] = keys[n];
    equal -= another, count += another | (x > least);
  }
  return count;
}

// The same where the processor moves chosen lanes together (16384 queries of up to 4096 keys, topk 512, Zen 4:
// 65 ms, of which the products take 39; 93 with candidates of 64 bits, eight at once).
#if defined(__AVX512F__) && defined(EIGEN_VECTORIZE_AVX512)
/// Up to 16 of them; up to 15 numbers behind what is written change.
struct sixteen_scores {
  __m512 numbers;
  __mmask16 real;

  static sixteen_scores load(const float* from, idx_t count) {
    const __mmask16 real = static_cast<__mmask16>(count < 16 ? (1u << count) - 1 : 0xffffu);
    return {_mm512_maskz_loadu_ps(real, from), real};
  }
  __mmask16 above(__m512 x) const { return _mm512_mask_cmp_ps_mask(real, numbers, x, _CMP_GT_OQ); }
  __mmask16 from(__m512 x) const { return _mm512_mask_cmp_ps_mask(real, numbers, x, _CMP_GE_OQ); }
  __mmask16 below(__m512 x) const { return _mm512_mask_cmp_ps_mask(real, numbers, x, _CMP_LT_OQ); }
  idx_t store(float* to, __mmask16 these) const {
    _mm512_storeu_ps(to, _mm512_maskz_compress_ps(these, numbers));
    return std::popcount(static_cast<unsigned>(these));
  }
  static void store_keys(key_number* to, __m512i keys, __mmask16 these) {
    _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(these, keys));
  }
  /// The k-th largest lane.
  float kth_largest(idx_t k) const {
    const __m512 x = _mm512_mask_mov_ps(_mm512_set1_ps(-std::numeric_limits<float>::infinity()), real, numbers);
    __m512i larger = _mm512_setzero_si512();
    unroll_constants<15>([&](auto n) {
      const __m512i bits = _mm512_castps_si512(x);
      const __m512 other = _mm512_castsi512_ps(_mm512_alignr_epi32(bits, bits, n + 1));
      larger = _mm512_mask_sub_epi32(larger, _mm512_cmp_ps_mask(other, x, _CMP_GT_OQ), larger, _mm512_set1_epi32(-1));
    });
    const __mmask16 first = _mm512_cmp_epi32_mask(larger, _mm512_set1_epi32(static_cast<int>(k)), _MM_CMPINT_LT);
    return _mm512_mask_reduce_min_ps(first, x);
  }
};
template <side Side>
idx_t part_of(const float* from, idx_t count, float pivot, float* to) {
  const __m512 limit = _mm512_set1_ps(pivot);
  idx_t found = 0;
  for (idx_t n = 0; n < count; n += 16) {
    const auto x = sixteen_scores::load(from + n, count - n);
    found += x.store(to + found, Side == side::above ? x.above(limit) : x.below(limit));
  }
  return found;
}
/// By the same place among 16 of them, but nearer to the middle: the k-th largest is then in the smaller part.
inline float pivot_of(const float* from, idx_t count, idx_t k) {
  if (count <= 16) return sixteen_scores::load(from, count).kth_largest(k);
  const auto four = [&](idx_t n) { return _mm_loadu_ps(from + (count - 4) * n / 3); };
  const __m256 low = _mm256_set_m128(four(1), four(0)), high = _mm256_set_m128(four(3), four(2));
  const __m512 sample = _mm512_castpd_ps(_mm512_insertf64x4(_mm512_castpd256_pd512(_mm256_castps_pd(low)),
                                                            _mm256_castps_pd(high), 1));
  const idx_t place = (16 * k + count / 2) / count;
  return sixteen_scores{sample, 0xffff}.kth_largest(2 * k < count ? (std::min)(place + 2, idx_t(8))
                                                                  : (std::max)(place - 1, idx_t(9)));
}
inline idx_t append_keys(const float* from, idx_t some, idx_t first, bool all, float threshold, float* scores,
                         key_number* keys) {
  const __m512 limit = _mm512_set1_ps(threshold), lowest = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  idx_t count = 0;
  for (idx_t n = 0; n < some; n += 16) {
    auto x = sixteen_scores::load(from + n, some - n);
    const __mmask16 these = all ? x.real : x.above(limit);
    x.numbers = _mm512_add_ps(_mm512_max_ps(x.numbers, lowest), _mm512_setzero_ps());  // NaN becomes the second operand
    sixteen_scores::store_keys(keys + count, _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(first + n))),
                               these);
    count += x.store(scores + count, these);
  }
  return count;
}
inline idx_t keep_from(float* scores, key_number* keys, idx_t all, float least, idx_t equal) {
  const __m512 limit = _mm512_set1_ps(least);
  idx_t count = 0;
  for (idx_t n = 0; n < all; n += 16) {
    const auto x = sixteen_scores::load(scores + n, all - n);
    __mmask16 these = x.from(limit);
    if (unsigned others = these & ~x.above(limit); others != 0) [[unlikely]] {
      const int wanted = static_cast<int>((std::min)(equal, idx_t(16)));
      equal -= (std::min)(equal, idx_t(std::popcount(others)));
      for (int kept = 0; kept < wanted; ++kept) others &= others - 1;
      these = static_cast<__mmask16>(these & ~others);
    }
    sixteen_scores::store_keys(keys + count, _mm512_loadu_si512(keys + n), these);
    count += x.store(scores + count, these);
  }
  return count;
}
#endif

/// The k-th largest of `count` numbers, 1 <= k <= count, and how many are above it. `to` and `spare` have room for all.
template <class T>
std::pair<T, idx_t> kth_largest(const T* from, idx_t count, idx_t k, T* to, T* spare) {
  for (idx_t passed = 0;; std::swap(to, spare)) {
    const T pivot = pivot_of(from, count, k);
    const bool upper_first = 2 * k < count;  // which part it is in, as a rule
    idx_t above = upper_first ? part_of<side::above>(from, count, pivot, to) : 0;
    if (k > above) {
      const idx_t below = part_of<side::below>(from, count, pivot, to), others = count - below;
      if (k > others) {
        from = to, count = below, k -= others, passed += others;
        continue;
      }
      if (!upper_first) above = part_of<side::above>(from, count, pivot, to);
      if (k > above) return {pivot, passed + above};
    }
    from = to, count = above;
  }
}

template <class T>
struct scored_keys {
  T* scores = nullptr;
  key_number* keys = nullptr;
  idx_t count = 0;

  static scored_keys layout(arena& memory, idx_t room) {
    return {.scores = memory.allocate<T>(room), .keys = memory.allocate<key_number>(room)};
  }
  candidate<T> operator[](idx_t n) const { return {scores[n], static_cast<idx_t>(keys[n])}; }
  void add(const candidate<T>& x) { scores[count] = x.score(), keys[count++] = static_cast<key_number>(x.key()); }
};

/// Of one query.
template <class T>
struct topk_keys : scored_keys<T> {
  using scored_keys<T>::scores, scored_keys<T>::keys, scored_keys<T>::count;

  T *some = nullptr, *others = nullptr;  // [room_for(..)]; may be shared
  idx_t topk = 0, capacity = 0;          // of more than `capacity` candidates some are dropped
  T threshold = -std::numeric_limits<T>::infinity();  // keys of scores that are not above it are not wanted
  bool full = false;                                  // whether there are so many

  static constexpr idx_t at_once = 64;  // keys that are looked at between two looks at the capacity
  static idx_t capacity_of(idx_t topk, idx_t keys) { return (std::min)(std::max<idx_t>(4 * topk, 256), keys); }
  static idx_t room_for(idx_t topk, idx_t keys) { return capacity_of(topk, keys) + at_once + width<T>; }

  static topk_keys layout(arena& memory, idx_t topk, idx_t keys, T* some, T* others) {
    return {scored_keys<T>::layout(memory, room_for(topk, keys)), some, others, topk, capacity_of(topk, keys)};
  }
  void clear() { count = 0, full = false, threshold = -std::numeric_limits<T>::infinity(); }

  /// The scores of n_keys keys from `first` on.
  void take(const T* of_keys, idx_t first, idx_t n_keys) {
    const bool seeded = count == 0 && !full && n_keys >= 2 * topk && n_keys >= 2 * sampled && seed(of_keys, n_keys);
    append(of_keys, first, n_keys);
    if (!seeded || count >= topk) return;
    clear();
    append(of_keys, first, n_keys);
  }
  /// The candidates of a list of later keys.
  void merge(const topk_keys& later) {
    for (idx_t n = 0; n < later.count; ++n) {
      this->add(later[n]);
      drop_beyond(capacity);
    }
  }
  /// Leaves the topk best, in the order of keys.
  void finish() { drop_beyond(topk); }

 private:
  static constexpr idx_t sampled = 256;

  void append(const T* of_keys, idx_t first, idx_t n_keys) {
    for (idx_t n = 0; n < n_keys; n += at_once) {
      count += append_keys(of_keys + n, (std::min)(n_keys - n, at_once), first + n, !full, threshold, scores + count,
                           keys + count);
      drop_beyond(capacity);
    }
  }
  /// A threshold that nearly always topk of the scores are above, and not many more: by a sample of them.
  [[gnu::noinline]] bool seed(const T* of_keys, idx_t n_keys) {
    constexpr idx_t runs = 16, run = sampled / runs;
    const packet<T> lowest = broadcast<T>(-std::numeric_limits<T>::infinity());
    for (idx_t r = 0; r < runs; ++r)
      for (idx_t n = 0; n < run; n += width<T>)  // NaN becomes the first operand
        store<T>(others + r * run + n, (max)(lowest, load<T>(of_keys + r * (n_keys - run) / (runs - 1) + n)));
    const double share = static_cast<double>(topk) / static_cast<double>(n_keys), rank = sampled * share;
    const idx_t wanted = static_cast<idx_t>(rank + 2.5 * std::sqrt(rank * (1 - share))) + 1;
    if (wanted > sampled * 3 / 4) return false;
    threshold = kth_largest<T>(others, sampled, wanted, some, scores).first;
    return full = true;
  }
  void drop_beyond(idx_t most) {
    if (count > topk && count >= most) drop();
  }
  [[gnu::noinline]] void drop() {
    const auto [least, above] = kth_largest<T>(scores, count, topk, some, others);
    count = keep_from(scores, keys, count, least, topk - above);
    threshold = least, full = true;
  }
};

}}}  // namespace attn::ATTN_ISA::detail
