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

/// Scratch of one worker. Blocks with the same past are collected, also of several query heads, so that keys and their
/// gradients are read once for all of them.
template <class T>
struct spread_backward {
  idx_t most = 0;                         // blocks
  idx_t dim = 0, padded = 0, stride = 0;  // padded: of dim, in whole panels
  idx_t blocks = 0, past = 0;             // those collected
  T *d_near = nullptr, *d_far = nullptr;  // gradients of the scores of one block's own clusters, and of the others
  T* d_ranks = nullptr;                   // [most][stride]: of the scores of the mean queries, per key
  T* mean = nullptr;                      // [dim]: a mean query
  T* means = nullptr;                     // all of them, panels [most][panel_width]
  T* lanes = nullptr;                     // [most][dim][width]: sums of their gradients
  T** d_means = nullptr;                  // [most]: where these go, or null

  static spread_backward layout(arena& memory, const multipole_settings& o, idx_t keys, idx_t dim) {
    spread_backward s;
    s.dim = dim, s.padded = round_up(dim, panel_width<T>);
    s.stride = round_up(cluster_members::no_key<T>(keys) + 1, tile_rows);
    s.most = std::clamp<idx_t>(131072 / s.stride, tile_rows, 48);  // beyond 48 blocks, reading keys costs little
    s.d_near = memory.allocate<T>(multipole_block<T>::most_slots(o, keys));
    s.d_far = memory.allocate<T>(o.segments(keys) * o.clusters);
    s.d_ranks = memory.allocate<T>(s.most * s.stride);
    s.mean = memory.allocate<T>(dim);
    s.means = memory.allocate<T>(s.most * s.padded);
    s.lanes = memory.allocate<T>(s.most * dim * width<T>);
    s.d_means = memory.allocate<T*>(s.most);
    return s;
  }
  void clear(const multipole_block<T>& c) const {
    std::fill_n(d_near, c.slots, T(0));
    std::fill_n(d_far, c.far, T(0));
  }

  /// Whether flush() must come before a block of this past.
  bool full(idx_t next) const { return blocks == most || (blocks > 0 && past != next); }

  /// Takes in block number b of those ranked together: the gradients of the scores of its mean query, from those of the
  /// clusters' scores.
  template <class S>
  void collect(const multipole_keys<T, S>& k, const multipole_block<T>& c, idx_t b, const rank_scores<T>& scores,
               T sign, idx_t its_past, T* d_mean) {
    past = its_past;
    d_means[blocks] = d_mean;
    T* const d = d_ranks + blocks * stride;
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
      means[n / panel_width<T> * most * panel_width<T> + blocks * panel_width<T> + n % panel_width<T>] =
          n < dim ? mean[n] * sign : T(0);
    ++blocks;
  }

  /// Adds the gradients of the blocks collected to those of the keys, if given, and stores those of the mean queries.
  template <class S>
  void flush(const multipole_keys<T, S>& k, T* d_keys) {
    if (blocks > 0 && d_keys) add_to_keys(d_keys);
    if (blocks > 0 && d_means[0]) store_means(k);
    blocks = 0;
  }

 private:
  void add_to_keys(T* d_keys) const {
    for (idx_t j = 0; j < past; j += tile_rows)
      for (idx_t col = 0; col < padded; col += panel_width<T>)
        with_tile_height(std::min<idx_t>(tile_rows, past - j), [&](auto M) {
          tile_product<T, M.value, 2>(columns_of_keys<T>{d_ranks + j, stride}, means + col * most, blocks,
                                      [&](auto m, auto n, const auto& x) {
                                        if (j + m >= past) return;
                                        T* const to = d_keys + (j + m) * padded + col + n * width<T>;
                                        store<T>(to, add(load<T>(to), x));
                                      });
        });
  }

  template <class S>
  void store_means(const multipole_keys<T, S>& k) const {
    constexpr idx_t piece = 512, wide = panel_width<T>;
    constexpr int high = 4, across = tile_rows >= 12 ? 4 : 2;  // accumulators that fit the registers
    const idx_t whole = past / width<T> * width<T>;
    std::fill_n(lanes, blocks * dim * width<T>, T(0));
    for (idx_t begin = 0; begin < whole; begin += piece)
      for (idx_t b = 0; b < blocks; b += high)
        for (idx_t d = 0; d < dim; d += across) {
          const T* rows[high];
          idx_t column[across];
          for (idx_t i = 0; i < high; ++i) rows[i] = d_ranks + std::min(b + i, blocks - 1) * stride;
          for (idx_t n = 0; n < across; ++n) column[n] = std::min(d + n, dim - 1) * wide;
          packet<T> sums[high * across];
          unroll<high * across>([&](auto n) { sums[n] = zero<T>(); });
          for (idx_t j = begin; j < std::min(whole, begin + piece); j += width<T>) {
            const T* const keys = k.clusters.panels + j / wide * wide * dim + j % wide;
            packet<T> key[across];
            unroll<across>([&](auto n) { key[n] = load<T>(keys + column[n]); });
            unroll<high>([&](auto i) {
              const packet<T> one = load<T>(rows[i] + j);
              unroll<across>([&](auto n) { sums[i * across + n] = fma(one, key[n], sums[i * across + n]); });
            });
          }
          for (idx_t i = 0; i < std::min<idx_t>(high, blocks - b); ++i)
            for (idx_t n = 0; n < std::min<idx_t>(across, dim - d); ++n) {
              T* const to = lanes + ((b + i) * dim + d + n) * width<T>;
              store<T>(to, add(load<T>(to), sums[i * across + n]));
            }
        }
    for (idx_t b = 0; b < blocks; ++b) {
      T* const to = d_means[b];
      for (idx_t d = 0; d < dim; ++d) {
        to[d] = sum_lanes(load<T>(lanes + (b * dim + d) * width<T>));
        for (idx_t j = whole; j < past; ++j)
          to[d] += d_ranks[b * stride + j] * static_cast<T>(k.key.row(j)[d * k.key.col_stride]);
      }
    }
  }
};

}}}  // namespace attn::ATTN_ISA::detail
