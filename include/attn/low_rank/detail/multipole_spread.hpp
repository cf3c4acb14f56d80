// attn: what the spread of its keys adds to the score of a cluster of multipole. With r_j the scores that the mean of
// the queries by which a block chooses has with the n keys left of the cluster, that is
//
//   log (1/n sum e^(r_j - mean r)),     together with log n: log sum e^(r_j - mean r)
//
// It is at least 0, and 0 for one key. Where no keys are ranked, clusters have no such term.
#pragma once

#include <attn/low_rank/detail/multipole_clusters.hpp>
#include <attn/softmax/detail/score_loops.hpp>
#include <attn/softmax/detail/score_terms.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// How ranks become scores: c tanh(scale rank / c) with a softcap c; `scale` without its sign, which ranks have.
template <class T>
struct rank_scores {
  T scale = T(1);
  std::optional<T> softcap{};
  T sign = T(1);

  static rank_scores of(const score_terms<T, no_score>& terms) {
    return {std::abs(terms.scale), terms.softcap, terms.scale < T(0) ? T(-1) : terms.scale > T(0) ? T(1) : T(0)};
  }
  /// What differences of scores are multiplied by, for base 2.
  T factor() const { return softcap ? log2_e<T> : scale * log2_e<T>; }
  T of(T rank, T offset) const { return softcap ? *softcap * std::tanh((rank + offset) * (scale / *softcap)) : rank; }
  /// x[n] = the score of rank x[n] + offset, unless that is factor() away; -infinity stays.
  void apply(T* x, idx_t count, T offset) const {
    if (!softcap) return;
    const T cap = *softcap;
    map_packets(x, x, count, [&](const packet<T>& rank) {
      const packet<T> share = mul(add(rank, broadcast<T>(offset)), broadcast<T>(scale / cap));
      const packet<T> score = mul(broadcast<T>(cap), tanh<T>(share));
      return if_less(rank, broadcast<T>(std::numeric_limits<T>::lowest()), rank, score);
    });
  }
};

/// sum e^(x - reference), and mean x - reference, in units in which powers of 2 are taken.
template <class T>
struct spread_sums {
  T sum = T(0), mean = T(0);

  /// False where an x is not finite, or their range is not.
  bool finite() const { return sum > T(0) && std::abs(sum) + std::abs(mean) <= (std::numeric_limits<T>::max)(); }
  /// Whether what is so far below the reference that its power is 0 would not change the sum either.
  bool has_all_digits() const {
    constexpr T last_digit = std::numeric_limits<T>::epsilon();
    return finite() && sum >= (std::numeric_limits<T>::min)() / (last_digit * last_digit);
  }
  T log2_sum() const { return std::log2(sum) - mean; }
};

/// The same by lanes, for numbers among x[0, size), all others being -infinity; size in whole packets.
template <class T>
struct spread_lanes {
  packet<T> powers = zero<T>(), distances = zero<T>();

  /// x becomes e^(x - reference), in units in which factor x is a power of 2.
  ATTN_INLINE void add(T* x, idx_t size, T reference, T factor) {
    constexpr idx_t piece = 256 * width<T>;  // sums of more lose digits
    const packet<T> least = broadcast<T>(reference), times = broadcast<T>(factor);
    const packet<T> lowest = broadcast<T>(std::numeric_limits<T>::lowest());
    for (idx_t begin = 0; begin < size; begin += piece) {
      spread_lanes part;
      for (idx_t n = begin; n < (std::min)(size, begin + piece); n += width<T>) {
        const packet<T> distance = mul(sub(load<T>(x + n), least), times), power = exp2_weight<T>(distance);
        store<T>(x + n, power);
        part.powers = detail::add(part.powers, power);
        part.distances = detail::add(part.distances, if_less(distance, lowest, zero<T>(), distance));
      }
      powers = detail::add(powers, part.powers), distances = detail::add(distances, part.distances);
    }
  }
};

/// Of `count` numbers, about their maximum.
template <class T>
spread_sums<T> spread_about_maximum(T* x, idx_t size, T count, T factor) {
  packet<T> highest = broadcast<T>(-std::numeric_limits<T>::infinity());
  for (idx_t n = 0; n < size; n += width<T>) highest = (max)(highest, load<T>(x + n));
  spread_lanes<T> lanes;
  lanes.add(x, size, max_lanes(highest), factor);
  return {sum_lanes(lanes.powers), sum_lanes(lanes.distances) / count};
}

/// The keys of one head in the order of their clusters.
struct cluster_members {
  std::int32_t* keys = nullptr;  // ascending within a cluster, which begins at a multiple of the vector width
  idx_t* begins = nullptr;       // [clusters + 1]
  idx_t none = 0;                // in the place of a key where a cluster has no more

  /// Which keys [0, keys) do not have.
  template <class T>
  static idx_t no_key(idx_t keys) {
    return round_up(keys + 1, panel_width<T>) - 1;
  }
  static bool used(const multipole_settings& o) { return o.exact > 0 && o.clusters > 0; }
  template <class T>
  static cluster_members layout(arena& memory, const multipole_settings& o, idx_t keys) {
    const idx_t rows = used(o) ? o.segments(keys) * o.clusters : 0;
    return {memory.allocate<std::int32_t>(capacity<T>(o, keys)), memory.allocate<idx_t>(rows > 0 ? 2 * rows + 1 : 0),
            no_key<T>(keys)};
  }
  template <class T>
  static idx_t capacity(const multipole_settings& o, idx_t keys) {
    if (!used(o)) return 0;
    const idx_t rows = o.segments(keys) * o.clusters;
    return keys + (std::min)(rows, keys) * (width<T> - 1);
  }
  template <class T>
  void fill(const multipole_settings& o, const multipole_clusters<T>& c, idx_t count) const {
    if (!used(o) || o.segments(count) == 0) return;
    const idx_t rows = o.segments(count) * o.clusters, size = o.segment_keys(count);
    idx_t* const next = begins + rows + 1;
    begins[0] = 0;
    for (idx_t r = 0; r < rows; ++r) {
      next[r] = begins[r];
      begins[r + 1] = begins[r] + round_up(static_cast<idx_t>(c.sums.counts[r]), width<T>);
    }
    std::fill_n(keys, begins[rows], static_cast<std::int32_t>(none));
    for (idx_t segment = 0; segment < o.segments(count); ++segment)
      for (idx_t j = segment * size; j < (segment + 1) * size; ++j)
        keys[next[segment * o.clusters + c.cluster[j]]++] = static_cast<std::int32_t>(j);
  }
};

}}}  // namespace attn::ATTN_ISA::detail
