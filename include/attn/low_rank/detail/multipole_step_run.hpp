// attn: one token of multipole_step, for the query heads of one key head:
//
//   1. scores of all clusters             one reading of their means, for all query heads
//   2. per query head: choose             clusters, then keys among those of the clusters chosen
//   3. one softmax over keys taken, the rests of clusters, and the own segment
//
// The rest of a cluster is computed without its keys. With S the members taken, and n_rest those left, its score is (n
// s - sum_S s_j) / n_rest, and its value (n v - sum_S v_j) / n_rest. Instead of computing that value, the weights of
// the clusters' means and of the keys taken are changed. What the spread of its keys adds to the score of a cluster is
// that of the ranks its keys were chosen by: clusters whose keys are not read have none.
#pragma once

#include <attn/low_rank/detail/multipole_choice.hpp>
#include <attn/low_rank/detail/multipole_spread.hpp>
#include <attn/low_rank/multipole_cache.hpp>
#include <attn/softmax/detail/softmax_call.hpp>
#include <attn/softmax/detail/streaming.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// scores[n] = q . row(n) for `count` rows of contiguous numbers; `scores` takes whole packets.
template <class T, class Row>
void gathered_scores(const T* q, Row&& row, idx_t count, idx_t dim, T* scores) {
  constexpr idx_t distance = 8;
  for (idx_t n = 0; n < count; n += width<T>) {
    packet<T> sums[width<T>];
    for (int i = 0; i < width<T>; ++i) {
      const auto* const x = row((std::min)(n + i, count - 1));
      prefetch_bytes(reinterpret_cast<const char*>(row((std::min)(n + i + distance, count - 1))),
                     dim * static_cast<idx_t>(sizeof(*x)));
      packet<T> sum = zero<T>();
      for (idx_t d = 0; d < dim; d += width<T>) sum = fma(load<T>(q + d), load_part<T>(x + d, 1, dim - d), sum);
      sums[i] = sum;
    }
    store<T>(scores + n, sums_across<T>(sums));
  }
}

inline constexpr idx_t cluster_tile = 128;  // clusters scored at a time

template <class S>
struct multipole_step_driver {
  using T = compute_type<S>;

  const softmax_call<S, no_score>& in;
  const multipole_tokens<S>& cache;
  const attention_shape& shape = in.shape;
  const multipole_settings& o = cache.settings();
  tensor_view<const S> all_keys = cache.keys(), all_values = cache.values();

  idx_t most_past() const { return in.lengths.full_keys / o.segment * o.segment; }
  idx_t most_clusters() const { return most_past() / o.segment * o.clusters; }

  struct scratch {
    stream_queries<T, S> rows;
    online_softmax<T> own, distant;       // of the own segment; of everything else
    idx_t stride;                     // of cluster scores
    T* scores;                        // [group][stride]: of clusters, then their weights
    T *ranks, *buffer;                // of keys, of those and clusters
    T* taken_weights;                 // [exact]
    idx_t *list, *chosen, *taken;     // candidates, choices, keys taken
    cluster_number *of_list, *slot;   // the cluster of a candidate; [clusters]: its number among those that lost keys
    cluster_number *of_taken, *lost;  // [exact]
    T *lost_scores, *lost_counts;     // [exact]: sums over the members taken
    T* factors;                       // [exact]: what is subtracted from the weight of a member taken
  };
  scratch layout(arena& memory) const {
    const idx_t group = shape.group(), past = most_past(), clusters = most_clusters();
    const idx_t most = (std::min)(o.exact, past), listed = (std::max)(past, clusters);
    scratch s;
    s.rows = stream_queries<T, S>::layout(memory, group, shape.dim, shape.dim_v);
    s.own = online_softmax<T>::layout(memory, group, shape.dim_v);
    s.distant = online_softmax<T>::layout(memory, group, shape.dim_v);
    s.stride = round_up(clusters, cluster_tile);
    s.scores = memory.allocate<T>(group * s.stride);
    s.ranks = memory.allocate<T>(listed + width<T>), s.buffer = memory.allocate<T>(listed);
    s.taken_weights = memory.allocate<T>(most);
    s.list = memory.allocate<idx_t>(past), s.chosen = memory.allocate<idx_t>(listed);
    s.taken = memory.allocate<idx_t>(most);
    s.of_list = memory.allocate<cluster_number>(past), s.slot = memory.allocate<cluster_number>(clusters);
    s.of_taken = memory.allocate<cluster_number>(most), s.lost = memory.allocate<cluster_number>(most);
    s.lost_scores = memory.allocate<T>(most), s.lost_counts = memory.allocate<T>(most);
    s.factors = memory.allocate<T>(most);
    return s;
  }

  using clusters_of_head = typename multipole_tokens<S>::head_clusters;

  /// x[0] + ... + x[count - 1]; a packet from the last of these on can be read.
  static T sum_range(const T* x, idx_t count) {
    alignas(64) T lanes[width<T>];
    std::iota(lanes, lanes + width<T>, T(0));
    packet<T> sum = zero<T>();
    for (idx_t n = 0; n < count; n += width<T>)
      sum = add(sum, if_less(load<T>(lanes), broadcast<T>(static_cast<T>(count - n)), load<T>(x + n), zero<T>()));
    return sum_lanes(sum);
  }

  /// Step 1.
  void score_clusters(const clusters_of_head& c, idx_t clusters, scratch& s) const {
    const matrix_view<const T> means{c.means, clusters, c.stride, c.stride, 1};
    for (idx_t begin = 0; begin < clusters; begin += cluster_tile) {
      const idx_t count = (std::min)(cluster_tile, clusters - begin);
      const matrix_view<const T> tile{means.row(begin), count, c.stride, c.stride, 1};
      by_rows<T>(s.rows.rows, [&](idx_t r, auto R) {
        row_scores<T, R.value>(s.rows.data + r * s.rows.stride, s.rows.stride, T(1), tile,
                               s.rows.scores + r * stream_tile,
                               r == 0
                                   ? stream_prefetcher(means, begin + count, (std::min)(begin + 2 * count, clusters))
                                   : stream_prefetcher());
      });
      for (idx_t r = 0; r < s.rows.rows; ++r)
        std::copy_n(s.rows.scores + r * stream_tile, count, s.scores + r * s.stride + begin);
    }
  }

  /// Step 2, first half: candidates of row r with their clusters. Returns how many.
  idx_t candidates(const clusters_of_head& c, idx_t past, idx_t clusters, idx_t r, scratch& s) const {
    const idx_t segments = past / o.segment;
    idx_t found = 0;
    const auto members = [&](idx_t cluster) {
      const idx_t segment = cluster / o.clusters, first = segment * o.segment, begin = c.begins[cluster];
      const auto count = static_cast<idx_t>(c.counts[cluster]);
      for (idx_t n = begin; n < begin + count; ++n) {
        s.of_list[found] = static_cast<cluster_number>(cluster);
        s.list[found++] = first + c.order[first + n];
      }
    };
    if (o.exact >= past || o.candidate_clusters == 0) {
      if (o.clusters == 0)
        for (; found < past; ++found) s.list[found] = found, s.of_list[found] = 0;
      else
        for (idx_t cluster = 0; cluster < segments * o.clusters; ++cluster) members(cluster);
      return found;
    }
    T* const x = s.scores + r * s.stride;
    T* const ranks = s.buffer;  // of clusters; empty ones and NaN come last
    for (idx_t n = 0; n < clusters; ++n)
      ranks[n] = c.counts[n] > T(0) && x[n] == x[n] ? x[n] : -std::numeric_limits<T>::infinity();
    const idx_t nearby = choose_largest(ranks, clusters, o.candidate_clusters, s.ranks, s.chosen);
    for (idx_t n = 0; n < nearby; ++n) members(s.chosen[n]);
    return found;
  }

  /// Step 2, second half: the keys row r takes, and the scores of all candidates. Returns how many.
  idx_t take(idx_t found, idx_t kv_batch, idx_t kv, idx_t r, scratch& s) const {
    const matrix_view<const S> keys = head_of(all_keys, kv_batch, kv);
    gathered_scores(
        s.rows.data + r * s.rows.stride, [&](idx_t n) { return keys.row(s.list[n]); }, found, shape.dim, s.ranks);
    idx_t count = found;
    if (o.exact < found) {
      for (idx_t n = 0; n < found; ++n)
        if (s.ranks[n] != s.ranks[n]) s.ranks[n] = -std::numeric_limits<T>::infinity();
      count = choose_largest(s.ranks, found, o.exact, s.buffer, s.chosen);
    } else {
      std::iota(s.chosen, s.chosen + found, idx_t(0));
    }
    for (idx_t n = 0; n < count; ++n) {
      const idx_t at = s.chosen[n];
      s.taken[n] = s.list[at];
      s.of_taken[n] = s.of_list[at];
    }
    return count;
  }

  /// Powers of 2 of the scores of the candidates less the largest, which is returned: `ranks` becomes those of the keys
  /// left, and 0 for the keys taken; `taken_weights` are those of the latter.
  T take_powers(idx_t found, idx_t count, const scratch& s) const {
    constexpr T none = -std::numeric_limits<T>::infinity();
    T largest = none;
    for (idx_t n = 0; n < count; ++n) largest = (std::max)(largest, s.ranks[s.chosen[n]]);
    const packet<T> reference = broadcast<T>(largest == none ? T(0) : largest);
    for (idx_t n = 0; n < found; n += width<T>)
      store<T>(s.ranks + n, exp2_weight<T>(sub(load<T>(s.ranks + n), reference)));
    for (idx_t n = 0; n < count; ++n) s.taken_weights[n] = std::exchange(s.ranks[s.chosen[n]], T(0));
    return largest;
  }

  /// body(cluster, its candidates, how many of its keys are left)
  template <class Body>
  void visit_candidates(const clusters_of_head& c, idx_t found, const scratch& s, const Body& body) const {
    for (idx_t begin = 0, end; begin < found; begin = end) {
      const idx_t cluster = s.of_list[begin];
      end = begin + static_cast<idx_t>(c.counts[cluster]);
      const T lost = s.slot[cluster] < 0 ? T(0) : s.lost_counts[s.slot[cluster]];
      body(cluster, key_range{begin, end}, c.counts[cluster] - lost);
    }
  }

  /// Where scores are capped, the mean of the keys left does not have their mean score: x less the latter.
  void subtract_means(const clusters_of_head& c, idx_t found, idx_t count, T* x, const scratch& s) const {
    for (idx_t n = 0; n < count; ++n) s.buffer[n] = std::exchange(s.ranks[s.chosen[n]], T(0));
    visit_candidates(c, found, s, [&](idx_t cluster, key_range keys, T rest) {
      if (rest > T(1)) x[cluster] -= std::accumulate(s.ranks + keys.begin, s.ranks + keys.end, T(0)) / rest;
    });
    for (idx_t n = 0; n < count; ++n) s.ranks[s.chosen[n]] = s.buffer[n];
  }

  /// Step 3 for everything but the own segment, for row r: weights of the clusters, and the sum over the keys taken,
  /// which are `count` of the `found` candidates.
  void weigh(const clusters_of_head& c, idx_t clusters, idx_t found, idx_t count, idx_t b, idx_t kv, idx_t r,
             scratch& s) const {
    constexpr T none = -std::numeric_limits<T>::infinity();
    T* const x = s.scores + r * s.stride;
    idx_t changed = 0;
    if (clusters > 0) {
      std::fill_n(s.slot, clusters, cluster_number(-1));
      for (idx_t n = 0; n < count; ++n) {
        cluster_number& slot = s.slot[s.of_taken[n]];
        if (slot < 0) {
          s.lost[changed] = s.of_taken[n];
          s.lost_scores[changed] = s.lost_counts[changed] = T(0);
          slot = static_cast<cluster_number>(changed++);
        }
        s.lost_scores[slot] += s.ranks[s.chosen[n]];
        s.lost_counts[slot] += T(1);
      }
    }
    for (idx_t n = 0; n < changed; ++n) {
      const idx_t cluster = s.lost[n];
      const T all = c.counts[cluster], rest = all - s.lost_counts[n];
      x[cluster] = rest > T(0) ? (all * x[cluster] - s.lost_scores[n]) / rest : T(0);
    }
    const auto terms = in.terms.for_head(b, kv * shape.group() + r, 0);
    if (terms.any()) {
      terms.apply(x, clusters, 0, {}, 0);
      terms.apply(s.ranks, found, 0, {}, 0);
    }
    if (terms.softcap && clusters > 0) subtract_means(c, found, count, x, s);
    const T largest = take_powers(found, count, s);
    // Scores without the log of how many keys, which follows for all clusters.
    if (clusters > 0)
      visit_candidates(c, found, s, [&](idx_t cluster, key_range keys, T rest) {
        if (!(rest > T(0))) {
          x[cluster] = none;
        } else if (rest > T(1) && std::abs(x[cluster]) <= (std::numeric_limits<T>::max)()) {
          const T sum = sum_range(s.ranks + keys.begin, keys.end - keys.begin);
          x[cluster] = (terms.softcap ? x[cluster] + largest : largest) + std::log2(sum) - c.logs[cluster];
        } else {
          x[cluster] -= c.logs[cluster];
        }
      });
    const idx_t padded = round_up(clusters, cluster_tile);
    std::fill(x + clusters, x + padded, none);
    packet<T> most = broadcast<T>(largest);
    for (idx_t n = 0; n < clusters; ++n) x[n] += c.logs[n];
    for (idx_t n = 0; n < padded; n += width<T>) most = (max)(most, load<T>(x + n));
    const T highest = max_lanes(most), reference = highest == none ? T(0) : highest;
    packet<T> sums = zero<T>();
    for (idx_t n = 0; n < padded; n += width<T>) {
      const packet<T> weight = exp2_weight<T>(sub(load<T>(x + n), broadcast<T>(reference)));
      store<T>(x + n, weight);
      sums = add(sums, weight);
    }
    T sum = sum_lanes(sums);
    for (idx_t n = 0; n < changed; ++n) {
      const idx_t cluster = s.lost[n];
      const T all = c.counts[cluster], rest = all - s.lost_counts[n];
      s.factors[n] = rest > T(0) ? x[cluster] / rest : T(0);
      x[cluster] = s.factors[n] * all;
    }
    const T to_reference = std::exp2(largest - reference);
    T* const out = s.distant.row(r);
    const matrix_view<const S> values = head_of(all_values, b, kv);
    for (idx_t n = 0; n < count; ++n) {
      const S* const value = values.row(s.taken[n]);
      prefetch_row(values, s.taken[(std::min)(n + 6, count - 1)]);
      const T weight = s.taken_weights[n] * to_reference;
      sum += weight;
      const T change = clusters > 0 ? weight - s.factors[s.slot[s.of_taken[n]]] : weight;
      if (change == T(0)) continue;
      const packet<T> factor = broadcast<T>(change);
      for (idx_t d = 0; d < shape.dim_v; d += width<T>)
        store<T>(out + d, fma(factor, load_part<T>(value + d, 1, shape.dim_v - d), load<T>(out + d)));
    }
    s.distant.maximum[r] = highest;
    s.distant.sum[r] = sum;
  }

  /// Adds the clusters' values by the weights of all rows.
  void add_clusters(const clusters_of_head& c, idx_t clusters, scratch& s) const {
    const T ones[4] = {T(1), T(1), T(1), T(1)};
    const matrix_view<const T> values{c.value_means, clusters, c.stride_v, c.stride_v, 1};
    for (idx_t begin = 0; begin < clusters; begin += cluster_tile) {
      const idx_t count = (std::min)(cluster_tile, clusters - begin), next = begin + count;
      const matrix_view<const T> tile{values.row(begin), count, c.stride_v, c.stride_v, 1};
      for (idx_t r = 0; r < s.rows.rows; ++r)
        std::copy_n(s.scores + r * s.stride + begin, cluster_tile, s.rows.scores + r * stream_tile);
      by_rows<T>(s.rows.rows, [&](idx_t r, auto R) {
        bool zeros = false;
        for (idx_t i = r; i < r + R.value; ++i)
          for (idx_t n = 0; n < cluster_tile; ++n) zeros |= s.rows.scores[i * stream_tile + n] == T(0);
        row_output<T, R.value>(
            s.rows.scores + r * stream_tile, zeros, ones, tile, s.distant.row(r), s.distant.stride,
            r == 0 ? stream_prefetcher(values, next, (std::min)(next + count, clusters)) : stream_prefetcher());
      });
    }
  }

  void attend_token(idx_t b, idx_t kv, idx_t t, scratch& s) const {
    const idx_t p = in.shift(b) + t, past = p / o.segment * o.segment, clusters = past / o.segment * o.clusters;
    const idx_t group = shape.group(), head = kv * group;
    s.rows.begin(in.q.slice(2, t, 1), {}, {b, head, 0, p}, group, 1, in.terms.query_factor());
    s.own.rows = s.distant.rows = group;
    s.own.clear(), s.distant.clear();
    const auto keys = head_of(all_keys, b, kv), values = head_of(all_values, b, kv);
    attend_stream(s.rows, keys, values, {}, past, p + 1, in.terms, {}, s.own);
    if (past > 0) {
      const clusters_of_head c = cache.clusters_of(b, kv);
      score_clusters(c, clusters, s);
      for (idx_t r = 0; r < group; ++r) {
        const idx_t found = o.exact > 0 ? candidates(c, past, clusters, r, s) : 0;
        weigh(c, clusters, found, found > 0 ? take(found, b, kv, r, s) : 0, b, kv, r, s);
      }
      add_clusters(c, clusters, s);
      s.own.merge(s.distant);
    }
    for (idx_t r = 0; r < group; ++r) in.finish_row(s.own, r, b, head + r, t);
  }

  void run() const {
    const idx_t tokens = in.lengths.full_keys,
                seen = most_clusters() + (std::min)(o.exact, tokens) + (std::min)(o.segment, tokens);
    const auto limit = in.limit_threads(seen, static_cast<double>(shape.queries) * static_cast<double>(seen));
    in.exec.for_each(shape.batch * shape.kv_heads, [&](idx_t task, int worker) {
      const idx_t b = task / shape.kv_heads, kv = task % shape.kv_heads;
      scratch s = in.exec.scratch(worker, [&](arena& memory) { return layout(memory); });
      for (idx_t t = 0; t < in.lengths.queries(b); ++t) attend_token(b, kv, t, s);
      for (idx_t h = kv * shape.group(); h < (kv + 1) * shape.group(); ++h) in.clear_padding(b, h);
    });
  }
};

/// Over the tokens of a cache, those of the call included.
template <class S>
void run_multipole_step(const softmax_call<S, no_score>& call, multipole_tokens<S>& tokens) {
  tokens.cluster_segments(call.exec);
  multipole_step_driver<S>{call, tokens}.run();
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN(S) void run_multipole_step(const softmax_call<S, no_score>&, multipole_tokens<S>&)
#include <attn/core/detail/compiled.hpp>
