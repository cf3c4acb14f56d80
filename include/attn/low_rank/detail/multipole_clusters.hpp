// attn: the clusters of multipole: k-means of the keys of a segment, and the sums over every cluster.
//
//   1. start     centres are keys of the segment, drawn by a seed
//   2. assign    every key goes to the nearest centre, of equal ones to the first: a product of centres and keys
//   3. merge     centres become the means of their keys; one without keys is unchanged. Steps 2 and 3 run `iterations`
//                times
//   4. assign, and sum up keys and values
//
// A segment is processed in parts of fixed size, whose sums are added at fixed places: the number of threads changes no
// bit. Sums take up to 64 keys, then are added: however many keys a cluster has, roundings do not add up.
#pragma once

#include <attn/core/detail/attention_shape.hpp>
#include <attn/core/detail/compensated.hpp>
#include <attn/core/detail/tile_product.hpp>
#include <attn/core/detail/waves.hpp>
#include <attn/core/random.hpp>
#include <attn/softmax/detail/packed_keys.hpp>

#include <numeric>

namespace attn { inline namespace ATTN_ISA { namespace detail {

inline constexpr idx_t cluster_part = 1024;  // keys of a part

/// The options with defaults filled in.
struct multipole_settings {
  bool causal = false, assigned = false;  // assigned: the caller gives the cluster of every key
  idx_t block = 1, probe = 1, exact = 0, clusters = 0, candidate_clusters = 0;
  idx_t segment = 1, lookback = 1;  // causal only
  idx_t iterations = 0;
  std::uint64_t seed = 0;

  /// Number of segments of a sequence of `keys` that are clustered: all but the last, which no later query sees.
  idx_t segments(idx_t keys) const {
    if (keys == 0) return 0;
    return causal ? (keys - 1) / segment : 1;
  }
  idx_t segment_keys(idx_t keys) const { return causal ? segment : keys; }
  idx_t parts_per_segment(idx_t keys) const { return ceil_div(segment_keys(keys), cluster_part); }
  /// Number of clusters of the segments before position `past`; of all keys where not causal.
  idx_t clusters_before(idx_t past) const {
    if (past == 0) return 0;
    return causal ? past / segment * clusters : assigned ? clusters : (std::min)(clusters, past);
  }
  idx_t parts(idx_t keys) const { return segments(keys) * parts_per_segment(keys); }
};

/// The checks that multipole and its cache have in common.
inline void check_multipole_settings(const validator& check, const multipole_settings& o) {
  check.at_least("exact", 0, o.exact);
  check.at_least("clusters", 0, o.clusters);
  if (o.exact == 0 && o.clusters == 0) check.fail("exact keys or clusters", "neither");
  check.at_least("candidate_clusters", 0, o.candidate_clusters);
  check.at_least("segment", 1, o.segment);
  check.at_least("iterations", 0, o.iterations);
  constexpr idx_t most = idx_t(1) << 24;  // float, the compute type, represents these integers
  if (o.clusters > most) check.fail({"clusters <= ", most}, o.clusters);
}

using cluster_number = std::int32_t;

/// Sums over the keys of clusters: rows of keys and values, and how many keys.
template <class T>
struct cluster_sums {
  idx_t stride = 0, stride_v = 0;
  T *keys = nullptr, *values = nullptr, *counts = nullptr;

  static idx_t padded(idx_t dim) { return round_up(dim, width<T>); }
  static cluster_sums layout(arena& memory, idx_t rows, idx_t dim, idx_t dim_v) {
    const idx_t stride = padded(dim), stride_v = padded(dim_v);
    return {stride, stride_v, memory.allocate<T>(rows * stride), memory.allocate<T>(rows * stride_v),
            memory.allocate<T>(rows)};
  }
  cluster_sums from(idx_t row) const {
    return {stride, stride_v, keys + row * stride, values + row * stride_v, counts + row};
  }
  T* key(idx_t row) const { return keys + row * stride; }
  T* value(idx_t row) const { return values + row * stride_v; }
  /// Adds row c of `some`, which becomes 0.
  void move(idx_t c, const cluster_sums& some) const {
    const auto add_to = [](T* to, T* from, idx_t count) {
      for (idx_t n = 0; n < count; ++n) to[n] += from[n], from[n] = T(0);
    };
    add_to(key(c), some.key(c), stride), add_to(value(c), some.value(c), stride_v);
    add_to(counts + c, some.counts + c, 1);
  }
  void clear(idx_t rows) const {
    std::fill_n(keys, rows * stride, T(0));
    std::fill_n(values, rows * stride_v, T(0));
    std::fill_n(counts, rows, T(0));
  }
};

/// to += sign * row i of x.
template <class T, class S>
ATTN_INLINE void add_row(T* to, const matrix_view<const S>& x, idx_t i, T sign = T(1)) {
  const S* const row = x.row(i);
  const packet<T> factor = broadcast<T>(sign);
  for (idx_t d = 0; d < x.cols; d += width<T>)
    store<T>(to + d, fma(load_part<T>(row + d * x.col_stride, x.col_stride, x.cols - d), factor, load<T>(to + d)));
}

/// Scratch of one worker.
template <class T>
struct cluster_scratch {
  T *centres = nullptr, *offsets = nullptr;  // less their mean m, packed as rows of tiles; |c|^2 / 2 + m.c
  T *rows = nullptr, *mean = nullptr;        // [clusters][padded dim]: centres less their mean
  idx_t* drawn = nullptr;                    // [keys of a segment]
  cluster_sums<T> some;                      // [clusters]: of keys that are not yet in the sums of the part

  static cluster_scratch layout(arena& memory, idx_t clusters, idx_t dim, idx_t dim_v, idx_t keys) {
    const idx_t tiles = round_up(clusters, tile_rows), stride = round_up(dim, width<T>);
    return {memory.allocate<T>(tiles * dim), memory.allocate<T>(tiles),
            memory.allocate<T>(clusters * stride), memory.allocate<T>(stride), memory.allocate<idx_t>(keys),
            cluster_sums<T>::layout(memory, clusters, dim, dim_v)};
  }

  /// Packs centres [clusters][stride], minus their mean: where keys are far from the origin, fewer digits are lost.
  void pack(const T* from, idx_t stride, idx_t clusters, idx_t dim) const {
    std::fill_n(mean, stride, T(0));
    for (idx_t c = 0; c < clusters; ++c)
      for (idx_t d = 0; d < dim; ++d) mean[d] += from[c * stride + d];
    for (idx_t d = 0; d < dim; ++d) mean[d] /= static_cast<T>(clusters);
    for (idx_t c = 0; c < clusters; ++c)
      for (idx_t d = 0; d < dim; ++d) rows[c * stride + d] = from[c * stride + d] - mean[d];
    for (idx_t c = 0; c < clusters; c += tile_rows)
      pack_rows<T>([&](idx_t n) { return rows + (c + n) * stride; }, std::min<idx_t>(tile_rows, clusters - c), dim, 1,
                   T(1), centres + c * dim);
    for (idx_t c = 0; c < round_up(clusters, tile_rows); ++c) {
      const T* const row = rows + (std::min)(c, clusters - 1) * stride;
      T square = 0, of_mean = 0;
      for (idx_t d = 0; d < dim; ++d) square += row[d] * row[d], of_mean += row[d] * mean[d];
      offsets[c] = square / T(2) + of_mean;
    }
  }
};

/// cluster[j] = the nearest centre, argmax (k_j - m).c - |c|^2 / 2 of centres c less m, of the keys [begin, end), which
/// lie in panels.
template <class T>
void nearest_centres(const cluster_scratch<T>& s, idx_t clusters, idx_t dim, const T* panels, idx_t begin, idx_t end,
                     cluster_number* cluster) {
  constexpr idx_t wide = panel_width<T>;
  for (idx_t first = begin / wide * wide; first < end; first += wide) {
    packet<T> best[2], at[2] = {zero<T>(), zero<T>()};
    best[0] = best[1] = broadcast<T>(-std::numeric_limits<T>::infinity());
    for (idx_t c = 0; c < clusters; c += tile_rows)
      with_tile_height(clusters - c, [&](auto M) {
        tile_product<T, M.value, 2>(packed_rows<T>{s.centres + c * dim}, panels + first * dim, dim,
                                    [&](auto m, auto n, const auto& x) {
                                      const packet<T> score = sub(x, broadcast<T>(s.offsets[c + m]));
                                      const packet<T> number = broadcast<T>(static_cast<T>(c + m));
                                      at[n] = if_less(best[n], score, number, at[n]);
                                      best[n] = if_less(best[n], score, score, best[n]);  // NaN is not larger
                                    });
      });
    alignas(64) T numbers[array_size<wide>];
    store<T>(numbers, at[0]);
    store<T>(numbers + width<T>, at[1]);
    for (idx_t j = (std::max)(begin, first); j < (std::min)(end, first + wide); ++j)
      cluster[j] = static_cast<cluster_number>(numbers[j - first]);
  }
}

/// The clusters of one head of keys: `segments` of them, one after the other.
template <class T>
struct multipole_clusters {
  cluster_number* cluster = nullptr;  // [keys]: within the segment
  cluster_sums<T> sums;               // [segments * clusters]
  cluster_sums<T> parts;              // [parts * clusters]; keys [segments * clusters]: centres
  T* centres = nullptr;               // [segments * clusters][stride]
  T* before = nullptr;                // [segments + 1][stride]: sums of the keys of earlier segments; what they lost
  T* panels = nullptr;                // all keys, packed across

  static multipole_clusters layout(arena& memory, const multipole_settings& o, idx_t keys, idx_t dim, idx_t dim_v) {
    const idx_t rows = o.segments(keys) * o.clusters, stride = cluster_sums<T>::padded(dim);
    multipole_clusters c;
    c.cluster = memory.allocate<cluster_number>(keys);
    c.sums = cluster_sums<T>::layout(memory, rows, dim, dim_v);
    c.parts = cluster_sums<T>::layout(memory, o.parts(keys) * o.clusters, dim, dim_v);
    c.centres = memory.allocate<T>(rows * stride);
    c.before = memory.allocate<T>((o.segments(keys) + 2) * stride);
    c.panels = memory.allocate<T>(round_up(keys, panel_width<T>) * dim);
    return c;
  }

  /// Without iteration: every key is its own cluster, or the caller gives the assignment.
  static bool iterates(const multipole_settings& o, idx_t keys) {
    return !o.assigned && o.clusters > 0 && o.segment_keys(keys) > o.clusters;
  }

  /// `number` is that of the segment in the sequence, by which its keys are drawn.
  template <class S>
  void start(const multipole_settings& o, const matrix_view<const S>& k, idx_t keys, idx_t segment, idx_t number,
             const cluster_scratch<T>& s) const {
    const idx_t size = o.segment_keys(keys);
    random_numbers random(o.seed, static_cast<std::uint64_t>(number));
    std::iota(s.drawn, s.drawn + size, idx_t(0));
    for (idx_t c = 0; c < o.clusters; ++c) std::swap(s.drawn[c], s.drawn[c + random.below(size - c)]);
    T* const to = centres + segment * o.clusters * sums.stride;
    std::fill_n(to, o.clusters * sums.stride, T(0));
    for (idx_t c = 0; c < o.clusters; ++c) add_row(to + c * sums.stride, k, segment * size + s.drawn[c]);
  }

  /// The keys of one part.
  key_range part_keys(const multipole_settings& o, idx_t keys, idx_t part) const {
    const idx_t per = o.parts_per_segment(keys), size = o.segment_keys(keys), segment = part / per;
    const idx_t begin = segment * size + part % per * cluster_part;
    return {begin, (std::min)(begin + cluster_part, (segment + 1) * size)};
  }

  void assign(const multipole_settings& o, idx_t dim, idx_t keys, idx_t part, const cluster_scratch<T>& s) const {
    const auto [begin, end] = part_keys(o, keys, part);
    s.pack(centres + part / o.parts_per_segment(keys) * o.clusters * sums.stride, sums.stride, o.clusters, dim);
    nearest_centres(s, o.clusters, dim, panels, begin, end, cluster);
  }

  /// Sums up the keys of a part, and the values unless they are null.
  template <class S>
  void add_part(const multipole_settings& o, const matrix_view<const S>& k, const matrix_view<const S>* v, idx_t keys,
                idx_t part, const cluster_sums<T>& some) const {
    constexpr int together = 64;
    const auto [begin, end] = part_keys(o, keys, part);
    const cluster_sums<T> to = parts.from(part * o.clusters);
    to.clear(o.clusters), some.clear(o.clusters);
    for (idx_t j = begin; j < end; ++j) {
      const idx_t c = cluster[j];
      add_row(some.key(c), k, j);
      if (v) add_row(some.value(c), *v, j);
      some.counts[c] += T(1);
      if (some.counts[c] == T(together)) to.move(c, some);
    }
    for (idx_t c = 0; c < o.clusters; ++c)
      if (some.counts[c] > T(0)) to.move(c, some);
  }

  /// Adds the parts of a segment, pair by pair; then centres become means.
  void merge(const multipole_settings& o, idx_t keys, idx_t segment, bool with_values) const {
    const idx_t per = o.parts_per_segment(keys), rows = o.clusters;
    const cluster_sums<T> to = sums.from(segment * rows), first = parts.from(segment * per * rows);
    const auto add = [&](T* all, const T* part, idx_t count) {
      for (idx_t n = 0; n < count; ++n) all[n] += part[n];
    };
    for (idx_t step = 1; step < per; step *= 2)
      for (idx_t p = 0; p + step < per; p += 2 * step) {
        const cluster_sums<T> one = first.from(p * rows), other = first.from((p + step) * rows);
        add(one.keys, other.keys, rows * to.stride);
        add(one.counts, other.counts, rows);
        if (with_values) add(one.values, other.values, rows * to.stride_v);
      }
    std::copy_n(first.keys, rows * to.stride, to.keys);
    std::copy_n(first.counts, rows, to.counts);
    if (with_values) std::copy_n(first.values, rows * to.stride_v, to.values);
    for (idx_t c = 0; c < rows; ++c) {
      if (to.counts[c] == T(0)) continue;
      T* const centre = centres + (segment * rows + c) * to.stride;
      for (idx_t d = 0; d < to.stride; ++d) centre[d] = to.key(c)[d] / to.counts[c];
    }
  }

  /// All of it for one segment: rows of k and v are its own. `keys` is such that there is one.
  template <class S>
  void cluster_one(const multipole_settings& o, const matrix_view<const S>& k, const matrix_view<const S>& v,
                   idx_t keys, idx_t number, const cluster_scratch<T>& s) const {
    const idx_t size = o.segment_keys(keys);
    pack_panels_across<T>([&](idx_t j) { return k.row(j); }, size, k.cols, k.col_stride, panels);
    const bool iterated = iterates(o, keys);
    if (iterated) start(o, k, keys, 0, number, s);
    for (idx_t step = 0; step <= o.iterations; ++step) {
      const bool last = step == o.iterations;
      for (idx_t part = 0; part < o.parts(keys); ++part) {
        if (iterated)
          assign(o, k.cols, keys, part, s);
        else
          for (idx_t j = part_keys(o, keys, part).begin; j < part_keys(o, keys, part).end; ++j)
            cluster[j] = static_cast<cluster_number>(j);
        add_part(o, k, last ? &v : nullptr, keys, part, s.some);
      }
      merge(o, keys, 0, last);
    }
  }

  /// Sums of all keys of the segments before each one, for their means; without clusters, of the keys themselves.
  template <class S>
  void sum_before(const multipole_settings& o, const matrix_view<const S>& k, idx_t keys) const {
    const idx_t stride = sums.stride, size = o.segment_keys(keys);
    T* const errors = before + (o.segments(keys) + 1) * stride;
    std::fill_n(before, stride, T(0)), std::fill_n(errors, stride, T(0));
    for (idx_t n = 0; n < o.segments(keys); ++n) {
      T* const to = before + (n + 1) * stride;
      std::fill_n(to, stride, T(0));
      for (idx_t c = 0; c < o.clusters; ++c)
        for (idx_t d = 0; d < stride; ++d) to[d] += sums.key(n * o.clusters + c)[d];
      for (idx_t j = 0; o.clusters == 0 && j < size; ++j) add_row(to, k, n * size + j);
      for (idx_t d = 0; d < stride; d += width<T>) {
        packet<T> sum = load<T>(to - stride + d), error = load<T>(errors + d);
        add_compensated(sum, error, load<T>(to + d));
        const packet<T> all = compensated_sum<T>(sum, error);
        store<T>(to + d, all), store<T>(errors + d, sub(error, sub(all, sum)));
      }
    }
  }
};

}}}  // namespace attn::ATTN_ISA::detail
