// attn: the gradients of what the spread of its keys adds to the score of a cluster of multipole
// (multipole_spread.hpp): with d the gradient of the score of the cluster, that of the score r_j of the block's mean
// query with one of its n keys is d (e^r_j / sum e^r - 1 / n). From there it goes to the keys, and to the queries of
// which that is the mean.
#pragma once

#include <attn/low_rank/detail/multipole_block.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Numbers that lie behind one another by keys, as the left operand whose rows are keys.
template <class T>
struct columns_of_keys {
  const T* data;
  idx_t stride;
  ATTN_INLINE T at(int m, idx_t k) const { return data[k * stride + m]; }
};

/// Scratch of one worker. Blocks are collected, also of several query heads, so that keys and their gradients are read
/// once for all of them.
template <class T>
struct spread_backward {
  idx_t most = 0;                         // blocks
  idx_t dim = 0, padded = 0, stride = 0;  // padded: of dim, in whole panels
  idx_t blocks = 0;                       // those collected
  T *d_near = nullptr, *d_far = nullptr;  // gradients of the scores of one block's own clusters, and of the others
  T* d_ranks = nullptr;                   // [most][stride]: of the scores of the mean queries, per key
  T* mean = nullptr;                      // [dim]: a mean query
  T* means = nullptr;                     // all of them, panels [most][panel_width]
  idx_t* pasts = nullptr;                 // [most]: ascending
  T** d_means = nullptr;                  // [most]: where the gradients of the mean queries go, rows of whole panels

  static spread_backward layout(arena& memory, const multipole_settings& o, idx_t keys, idx_t dim) {
    spread_backward s;
    s.dim = dim, s.padded = round_up(dim, panel_width<T>);
    s.stride = round_up(cluster_members::no_key<T>(keys) + 1, tile_rows);
    // Whole tiles; beyond 48 blocks, reading keys costs little.
    s.most = std::clamp<idx_t>(131072 / s.stride / tile_rows, 1, ceil_div(48, tile_rows)) * tile_rows;
    s.d_near = memory.allocate<T>(multipole_block<T>::most_slots(o, keys));
    s.d_far = memory.allocate<T>(o.segments(keys) * o.clusters);
    s.d_ranks = memory.allocate<T>(s.most * s.stride);
    s.mean = memory.allocate<T>(dim);
    s.means = memory.allocate<T>(s.most * s.padded);
    s.pasts = memory.allocate<idx_t>(s.most);
    s.d_means = memory.allocate<T*>(s.most);
    return s;
  }
  void clear(const multipole_block<T>& c) const {
    std::fill_n(d_near, c.slot_count, T(0));
    std::fill_n(d_far, c.distant, T(0));
  }

  /// Whether flush() must come before the next block.
  bool full() const { return blocks == most; }

  /// Takes in block number b of those ranked together: the gradients of the scores of its mean query, from those of the
  /// clusters' scores.
  template <class S>
  void collect(const multipole_keys<T, S>& k, const multipole_block<T>& c, idx_t b, const rank_scores<T>& scores,
               idx_t past, T* d_mean) {
    pasts[blocks] = past, d_means[blocks] = d_mean;
    T* const d = d_ranks + blocks * stride;
    for (idx_t cluster = 0; cluster < k.o.clusters_before(past); ++cluster) {
      const spread_sums<T>& sums = c.spreads[cluster];
      const idx_t slot = c.slot[cluster];
      if (!sums.finite()) {
        for (idx_t n = k.members.begins[cluster]; n < k.members.begins[cluster + 1]; ++n) d[k.members.keys[n]] = T(0);
        continue;
      }
      const T of_cluster = slot < 0 ? d_far[cluster] : d_near[slot];
      const T each = of_cluster / (slot < 0 ? k.clusters.sums.counts[cluster] : c.rest.counts[slot]);
      const packet<T> factor = broadcast<T>(of_cluster / sums.sum), less = broadcast<T>(each);
      for (idx_t n = k.members.begins[cluster]; n < k.members.begins[cluster + 1]; n += width<T>) {
        alignas(64) T lanes[width<T>];
        store<T>(lanes, sub(mul(load<T>(c.spread + n), factor), less));
        for (int lane = 0; lane < width<T>; ++lane) d[k.members.keys[n + lane]] = lanes[lane];
      }
    }
    if (scores.softcap) {
      const T* const x = (c.mean_ranks ? c.mean_ranks : c.ranks) + b * c.stride;
      const T offset = c.probes.block_offset(b), factor = scores.scale / *scores.softcap;
      for (idx_t j = 0; j < past; ++j) {
        const T t = std::tanh((x[j] + offset) * factor);
        d[j] *= (1 - t) * (1 + t);
      }
    }
    for (idx_t n = 0; n < c.taken; ++n) d[c.chosen[n]] = T(0);  // their ranks are -infinity, and d may be NaN
    c.probes.block_mean(b, mean);
    for (idx_t n = 0; n < padded; ++n)
      means[n / panel_width<T> * most * panel_width<T> + blocks * panel_width<T> + n % panel_width<T>] =
          n < dim ? mean[n] * scores.sign : T(0);
    ++blocks;
  }

  /// Adds the gradients of the blocks collected to those of the keys, if given, and stores those of the mean queries.
  template <class S>
  void flush(const multipole_keys<T, S>& k, T* d_keys) {
    constexpr idx_t most_keys = 256;  // their rows, and the numbers of some blocks, stay in the cache
    const bool queries = blocks > 0 && d_means[0];
    for (idx_t b = 0; queries && b < blocks; ++b) std::fill_n(d_means[b], padded, T(0));
    // A key is seen by the blocks from `first` on.
    for (idx_t begin = 0, first = 0, end; first < blocks; begin = end) {
      end = (std::min)(begin + most_keys, pasts[first]);
      if (d_keys) add_to_keys(d_keys, begin, end, first);
      if (queries) add_to_means(k, begin, end, first);
      while (first < blocks && pasts[first] <= end) ++first;
    }
    blocks = 0;
  }

 private:
  void add_to_keys(T* d_keys, idx_t begin, idx_t end, idx_t first) const {
    constexpr idx_t wide = panel_width<T>;
    for (idx_t j = begin; j < end; j += tile_rows)
      for (idx_t col = 0; col < padded; col += wide)
        with_tile_height(std::min<idx_t>(tile_rows, end - j), [&](auto M) {
          tile_product<T, M.value, 2>(columns_of_keys<T>{d_ranks + first * stride + j, stride},
                                      means + col * most + first * wide, blocks - first,
                                      [&](auto m, auto n, const auto& x) {
                                        if (j + m >= end) return;
                                        T* const to = d_keys + (j + m) * padded + col + n * width<T>;
                                        store<T>(to, add(load<T>(to), x));
                                      });
        });
  }

  template <class S>
  void add_to_means(const multipole_keys<T, S>& k, idx_t begin, idx_t end, idx_t first) const {
    for (idx_t b = first / tile_rows * tile_rows; b < blocks; b += tile_rows)
      for (idx_t col = 0; col < padded; col += panel_width<T>)
        with_tile_height(std::min<idx_t>(tile_rows, blocks - b), [&](auto M) {
          packet<T> sums[M.value * 2];
          unroll<M.value * 2>([&](auto n) { sums[n] = zero<T>(); });
          for (idx_t j = begin; j < end; ++j) {
            const S* const row = k.key.row(j) + col * k.key.col_stride;
            const packet<T> low = load_part<T>(row, k.key.col_stride, dim - col);
            const packet<T> high =
                col + width<T> < dim
                    ? load_part<T>(row + width<T> * k.key.col_stride, k.key.col_stride, dim - col - width<T>)
                    : zero<T>();
            unroll<M.value>([&](auto m) {
              const packet<T> one = broadcast<T>(d_ranks[(b + m) * stride + j]);
              sums[2 * m] = fma(one, low, sums[2 * m]), sums[2 * m + 1] = fma(one, high, sums[2 * m + 1]);
            });
          }
          unroll<M.value * 2>([&](auto n) {
            if (b + n / 2 < first || b + n / 2 >= blocks) return;
            T* const to = d_means[b + n / 2] + col + n % 2 * width<T>;
            store<T>(to, add(load<T>(to), sums[n]));
          });
        });
  }
};

}}}  // namespace attn::ATTN_ISA::detail
