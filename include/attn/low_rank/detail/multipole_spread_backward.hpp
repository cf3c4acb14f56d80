// attn: the gradients of what the spread of its keys adds to the score of a cluster of multipole (multipole_spread.hpp):
// with d the gradient of the score of the cluster, that of the score r_j of the block's mean query with one of its n keys
// is d (e^r_j / sum e^r - 1 / n). From there it goes to the keys, and to the queries of which that is the mean.
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

/// Scratch of one worker, for blocks that are ranked together.
template <class T>
struct spread_backward {
  idx_t dim = 0, padded = 0, stride = 0;  // padded: of dim, in whole panels
  idx_t together = 0;                     // blocks
  T *d_near = nullptr, *d_far = nullptr;  // gradients of the scores of one block's own clusters, and of the others
  T* d_ranks = nullptr;                   // [together][stride]: of the scores of the mean queries, per key
  T* mean = nullptr;                      // [padded]: a mean query
  T* means = nullptr;                     // all of them, panels [together][panel_width]
  T* lanes = nullptr;                     // [together][dim][width]: sums of their gradients

  static spread_backward layout(arena& memory, const multipole_settings& o, idx_t keys, idx_t dim) {
    if (!cluster_members::used(o)) return {};
    spread_backward s;
    s.dim = dim, s.padded = round_up(dim, panel_width<T>), s.together = multipole_blocks::together(o);
    s.stride = round_up(cluster_members::no_key<T>(keys) + 1, tile_rows);
    s.d_near = memory.allocate<T>(multipole_block<T>::most_slots(o, keys));
    s.d_far = memory.allocate<T>(o.segments(keys) * o.clusters);
    s.d_ranks = memory.allocate<T>(s.together * s.stride);
    s.mean = memory.allocate<T>(s.padded);
    s.means = memory.allocate<T>(s.together * s.padded);
    s.lanes = memory.allocate<T>(s.together * dim * width<T>);
    return s;
  }
  void clear(const multipole_block<T>& c) const {
    std::fill_n(d_near, c.slots, T(0));
    std::fill_n(d_far, c.far, T(0));
  }

  /// The gradients of the scores of the mean query of block number b, from those of the clusters' scores.
  template <class S>
  void differentiate(const multipole_keys<T, S>& k, const multipole_block<T>& c, idx_t past, idx_t b,
                     const rank_scores<T>& scores, T sign) const {
    T* const d = d_ranks + b * stride;
    std::fill_n(d, stride, T(0));
    for (idx_t cluster = 0; cluster < k.o.clusters_before(past); ++cluster) {
      const spread_sums<T>& sums = c.spreads[cluster];
      if (!sums.finite()) continue;
      const idx_t slot = c.slot[cluster];
      const T of_cluster = slot < 0 ? d_far[cluster] : d_near[slot];
      const T each = of_cluster / (slot < 0 ? k.clusters.sums.counts[cluster] : c.rest.counts[slot]);
      const T factor = of_cluster / sums.sum;
      for (idx_t n = k.members.begins[cluster]; n < k.members.begins[cluster + 1]; ++n)
        d[k.members.keys[n]] = c.spread[n] * factor - each;
    }
    for (idx_t n = 0; n < c.taken; ++n) d[c.chosen[n]] = T(0);
    d[k.members.none] = T(0);
    if (scores.softcap) {
      const T* const x = (c.mean_ranks ? c.mean_ranks : c.ranks) + b * c.stride;
      const T offset = c.probes.block_offset(b), factor = scores.scale / *scores.softcap;
      for (idx_t j = 0; j < past; ++j) {
        const T t = std::tanh((x[j] + offset) * factor);
        d[j] *= (1 - t) * (1 + t);
      }
    }
    c.probes.block_mean(b, mean);
    for (idx_t n = 0; n < padded; ++n)
      means[n / panel_width<T> * together * panel_width<T> + b * panel_width<T> + n % panel_width<T>] =
          n < dim ? mean[n] * sign : T(0);
  }

  /// Adds to rows [0, past) of the keys' gradients, for the first `blocks` blocks.
  void add_to_keys(T* d_keys, idx_t past, idx_t blocks) const {
    for (idx_t j = 0; j < past; j += tile_rows)
      for (idx_t col = 0; col < padded; col += panel_width<T>)
        with_tile_height(std::min<idx_t>(tile_rows, past - j), [&](auto M) {
          tile_product<T, M.value, 2>(columns_of_keys<T>{d_ranks + j, stride}, means + col * together, blocks,
                                      [&](auto m, auto n, const auto& x) {
                                        if (j + m >= past) return;
                                        T* const to = d_keys + (j + m) * padded + col + n * width<T>;
                                        store<T>(to, add(load<T>(to), x));
                                      });
        });
  }

  /// row(b)[d] = the gradient of the mean query of block b, for the first `blocks` blocks.
  template <class S, class Row>
  void mean_gradients(const multipole_keys<T, S>& k, idx_t past, idx_t blocks, Row&& row) const {
    constexpr idx_t piece = 512, high = 4, wide = panel_width<T>;
    const idx_t whole = past / width<T> * width<T>;
    std::fill_n(lanes, blocks * dim * width<T>, T(0));
    for (idx_t begin = 0; begin < whole; begin += piece)
      for (idx_t b = 0; b < blocks; b += high)
        for (idx_t d = 0; d < dim; d += 2) {
          const T* rows[high];
          for (idx_t i = 0; i < high; ++i) rows[i] = d_ranks + std::min(b + i, blocks - 1) * stride;
          const idx_t next = d + 1 < dim ? wide : 0;
          packet<T> sums[2 * high];
          for (auto& sum : sums) sum = zero<T>();
          for (idx_t j = begin; j < std::min(whole, begin + piece); j += width<T>) {
            const T* const keys = k.clusters.panels + j / wide * wide * dim + j % wide + d * wide;
            const packet<T> first = load<T>(keys), second = load<T>(keys + next);
            unroll<high>([&](auto i) {
              const packet<T> one = load<T>(rows[i] + j);
              sums[2 * i] = fma(one, first, sums[2 * i]);
              sums[2 * i + 1] = fma(one, second, sums[2 * i + 1]);
            });
          }
          for (idx_t i = 0; i < std::min(high, blocks - b); ++i)
            for (idx_t n = 0; n < std::min<idx_t>(2, dim - d); ++n) {
              T* const to = lanes + ((b + i) * dim + d + n) * width<T>;
              store<T>(to, add(load<T>(to), sums[2 * i + n]));
            }
        }
    for (idx_t b = 0; b < blocks; ++b) {
      T* const to = row(b);
      for (idx_t d = 0; d < dim; ++d) {
        to[d] = sum_lanes(load<T>(lanes + (b * dim + d) * width<T>));
        for (idx_t j = whole; j < past; ++j)
          to[d] += d_ranks[b * stride + j] * static_cast<T>(k.key.row(j)[d * k.key.col_stride]);
      }
    }
  }
};

}}}  // namespace attn::ATTN_ISA::detail
