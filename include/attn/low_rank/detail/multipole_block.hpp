// attn: what one block of queries of multipole sees: the keys it takes exactly, and the clusters without them, with
// what the spread of their keys adds to their scores.
//
// Where there are many more clusters than keys taken, most clusters stay whole: these are called `far`, and are packed
// once for all queries. Only clusters that lost a key are packed for the block.
#pragma once

#include <attn/core/detail/prefetch.hpp>
#include <attn/low_rank/detail/multipole_choice.hpp>
#include <attn/low_rank/detail/multipole_spread.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Queries [begin, end) that choose together. They see the clusters of keys [0, past), and in the causal form the keys
/// of their own segment, from `past` on. They choose by the queries [probe_begin, probe_end). Blocks of a head are
/// numbered.
struct query_block {
  idx_t begin = 0, end = 0, past = 0, probe_begin = 0, probe_end = 0, number = 0;
};

/// The blocks of one head, in tasks.
struct multipole_blocks {
  const multipole_settings& o;
  idx_t keys, queries;  // true lengths

  idx_t shift() const { return keys - queries; }
  /// Number of blocks whose probes are ranked at once, and of the probes of each.
  static idx_t together(const multipole_settings& o) { return std::max<idx_t>(1, tile_rows / probes(o)); }
  static idx_t probes(const multipole_settings& o) { return ceil_div(o.causal ? o.lookback : o.block, o.probe); }
  /// Number of tasks of the longest sequence.
  static idx_t tasks(const multipole_settings& o, idx_t most_keys, idx_t most_queries) {
    return o.causal ? ceil_div(most_keys, o.segment) : ceil_div(most_queries, o.block * together(o));
  }

  /// Upper bound of the number of blocks in a task.
  static idx_t per_task(const multipole_settings& o) {
    return o.causal ? ceil_div(o.segment, o.block) : together(o);
  }

  /// visit(blocks, count) for the blocks of a task that are ranked together, all of which have the same past.
  template <class Visit>
  void visit_task(idx_t task, Visit&& visit) const {
    query_block list[tile_rows];
    idx_t count = 0;
    const idx_t first = o.causal ? task * o.segment - shift() : task * o.block * together(o);
    const idx_t end = (std::min)(queries, first + (o.causal ? o.segment : o.block * together(o)));
    for (idx_t begin = first; begin < end; begin += o.block) {
      query_block one{.begin = std::max<idx_t>(begin, 0), .end = (std::min)(begin + o.block, end)};
      if (one.begin >= one.end) continue;
      one.past = o.causal ? task * o.segment : keys;
      one.probe_begin = o.causal ? std::max<idx_t>(0, one.begin + 1 - o.lookback) : one.begin;
      one.probe_end = o.causal ? one.begin + 1 : one.end;
      one.number = task * per_task(o) + (begin - first) / o.block;
      list[count++] = one;
      if (count < together(o) && begin + o.block < end) continue;
      visit(static_cast<const query_block*>(list), count);
      count = 0;
    }
  }
};

/// Memory that the threads share for one head of keys, clustered.
template <class T, class S>
struct multipole_keys {
  const multipole_settings& o;
  const multipole_clusters<T>& clusters;
  const cluster_members& members;
  matrix_view<const S> key, value;
  const T* far_logs = nullptr;    // [clusters]: log2 of their counts
  const T* far_panels = nullptr;  // their means, packed across

  /// The cluster of key j, numbered over all segments.
  idx_t cluster_of(idx_t j) const { return (o.causal ? j / o.segment * o.clusters : 0) + clusters.cluster[j]; }
};

/// Whether only the clusters that lost a key are packed for the block.
inline bool few_clusters_change(const multipole_settings& o, idx_t clusters) { return clusters > 2 * o.exact; }

/// Scratch of one worker.
template <class T>
struct multipole_block {
  idx_t stride = 0;  // of ranks
  probe_rows<T> probes;
  T* ranks = nullptr;                   // [together][stride]
  T* mean_ranks = nullptr;              // the same by the mean of a block's probes, where it has several
  T* buffer = nullptr;                  // [the larger of keys and clusters]
  T* some = nullptr;                    // [keys], for candidate_clusters
  T* spread = nullptr;                  // in the order of members: e^(score - maximum of the cluster), 0 for keys taken
  spread_sums<T>* spreads = nullptr;    // [clusters]: their sums; not finite where there are none
  T* far_ranks = nullptr;               // [together][clusters], for candidate_clusters
  bool* candidate = nullptr;            // [clusters]
  idx_t* list = nullptr;                // candidates, or positions
  idx_t* chosen = nullptr;              // [keys]: taken exactly, ascending
  cluster_sums<T> rest;                 // per slot: what is left of a cluster
  T* logs = nullptr;                    // per slot: log2 of how many keys
  T* far_logs = nullptr;                // [clusters]: -infinity for those that lost a key
  cluster_number* slot = nullptr;       // [clusters]: or -1
  cluster_number* of_slot = nullptr;    // per slot: the cluster
  idx_t taken = 0, slot_count = 0, distant = 0;  // counts: keys taken; own clusters, in whole panels; far ones

  static idx_t most_slots(const multipole_settings& o, idx_t keys) {
    const idx_t all = o.segments(keys) * o.clusters, most = few_clusters_change(o, all) ? 2 * o.exact : all;
    return round_up((std::min)(all, most), panel_width<T>);
  }
  static idx_t most_taken(const multipole_settings& o, idx_t keys) { return (std::min)(o.exact, keys); }

  static multipole_block layout(arena& memory, const multipole_settings& o, idx_t keys, idx_t dim, idx_t dim_v) {
    const idx_t all = o.segments(keys) * o.clusters, together = multipole_blocks::together(o);
    const idx_t slot_count = most_slots(o, keys), ranked = o.candidate_clusters > 0 ? round_up(all, panel_width<T>) : 0;
    multipole_block s;
    s.stride = cluster_members::no_key<T>(keys) + 1;
    s.probes = probe_rows<T>::layout(memory, together * multipole_blocks::probes(o), dim);
    s.ranks = memory.allocate<T>(together * s.stride);
    const bool several = cluster_members::used(o) && multipole_blocks::probes(o) > 1;
    s.mean_ranks = several ? memory.allocate<T>(together * s.stride) : nullptr;
    s.buffer = memory.allocate<T>((std::max)(s.stride, ranked));
    s.far_ranks = memory.allocate<T>(together * ranked);
    s.candidate = memory.allocate<bool>(all);
    s.some = memory.allocate<T>(o.candidate_clusters > 0 ? keys : 0);
    s.spread = memory.allocate<T>(cluster_members::capacity<T>(o, keys));
    s.spreads = memory.allocate<spread_sums<T>>(all);
    s.list = memory.allocate<idx_t>((std::max)(keys, all));
    s.chosen = memory.allocate<idx_t>(keys);
    s.rest = cluster_sums<T>::layout(memory, slot_count, dim, dim_v);
    s.logs = memory.allocate<T>(slot_count);
    s.far_logs = memory.allocate<T>(all);
    s.slot = memory.allocate<cluster_number>(all);
    s.of_slot = memory.allocate<cluster_number>(slot_count);
    return s;
  }

  /// Ranks the keys for some blocks with the same past. `sign` is that of the scale.
  template <class S>
  void rank(const multipole_keys<T, S>& k, const matrix_view<const S>& q, const query_block* blocks, idx_t count,
            T sign) {
    const multipole_settings& o = k.o;
    const idx_t past = blocks[0].past;
    if (past == 0 || o.exact == 0 || o.exact >= past) return;
    probes.rows = 0;
    for (idx_t b = 0; b < count; ++b) {
      const query_block& one = blocks[b];
      for (idx_t end = one.probe_end, begin; end > one.probe_begin; end = begin) {  // probes are counted from the end
        begin = (std::max)(end - o.probe, one.probe_begin);
        probes.add(q, begin, end, one.probe_end - one.probe_begin, sign, b);
      }
    }
    const idx_t segment = o.causal ? past / o.segment : 1;
    probes.finish(k.clusters.before + segment * k.clusters.sums.stride, past);
    probes.rank(k.clusters.panels, past, ranks, stride, mean_ranks);
    if (o.candidate_clusters > 0) {
      const idx_t all = o.clusters_before(past);
      probes.rank(k.far_panels, all, far_ranks, far_stride(o, k));
    }
  }

  /// The keys that block number b of those ranked takes.
  template <class S>
  void choose(const multipole_keys<T, S>& k, const query_block& one, idx_t b) {
    const multipole_settings& o = k.o;
    const T* const x = ranks + b * stride;
    if (o.exact == 0) {  // nothing was ranked
      taken = 0;
      return;
    }
    if (o.exact >= one.past || o.candidate_clusters == 0 || one.past == 0) {
      taken = choose_largest(x, one.past, o.exact, buffer, chosen);
      return;
    }
    const idx_t all = o.clusters_before(one.past);
    T* const of_clusters = far_ranks + b * far_stride(o, k);
    for (idx_t c = 0; c < all; ++c)
      if (k.clusters.sums.counts[c] == T(0)) of_clusters[c] = -std::numeric_limits<T>::infinity();
    const idx_t nearby = choose_largest(of_clusters, all, o.candidate_clusters, buffer, list);
    std::fill_n(candidate, all, false);
    for (idx_t n = 0; n < nearby; ++n) candidate[list[n]] = true;
    idx_t found = 0;
    for (idx_t j = 0; j < one.past; ++j)
      if (candidate[k.cluster_of(j)]) list[found] = j, some[found++] = x[j];
    taken = choose_largest(some, found, o.exact, buffer, chosen);
    for (idx_t n = 0; n < taken; ++n) chosen[n] = list[chosen[n]];
  }

  /// Whether the keys of cluster c were ranked. A block without a past has no clusters.
  bool ranked(const multipole_settings& o, idx_t past, idx_t c) const {
    return o.exact > 0 && o.exact < past && (o.candidate_clusters == 0 || candidate[c]);
  }

  /// The rest of every cluster, without the keys that block number b takes: its mean, and log2 of its size; where keys
  /// were ranked, log2 sum e^(r - mean r) in the place of that, r the scores of the block's mean query.
  template <class S>
  void leave(const multipole_keys<T, S>& k, const query_block& one, idx_t b, const rank_scores<T>& scores) {
    const idx_t all = k.o.clusters_before(one.past);
    const bool some_ranked = all > 0 && k.o.exact > 0 && k.o.exact < one.past;
    leave_means(k, one.past, some_ranked);
    if (!some_ranked) return;
    T* const x = (mean_ranks ? mean_ranks : ranks) + b * stride;
    T largest = taken > 0 ? std::numeric_limits<T>::infinity() : T(0);  // no key that is left has a larger rank
    for (idx_t n = 0; n < taken; ++n) largest = (std::min)(largest, ranks[b * stride + chosen[n]]);
    x[k.members.none] = -std::numeric_limits<T>::infinity();
    for (idx_t n = 0; n < taken; ++n) x[chosen[n]] = -std::numeric_limits<T>::infinity();
    const T offset = scores.softcap ? probes.block_offset(b) : T(0);
    const auto gather = [&](idx_t first, idx_t last) {  // scores of the keys of clusters [first, last)
      const idx_t begin = k.members.begins[first], end = k.members.begins[last];
      for (idx_t n = begin; n < end; ++n) spread[n] = x[k.members.keys[n]];
      scores.apply(spread + begin, end - begin, offset);
    };
    // All are gathered first: packets loaded soon after their numbers were stored one by one would wait for that.
    for (idx_t c = 0, first = 0; c <= all; ++c)
      if (c == all || !ranked(k.o, one.past, c)) {
        if (first < c) gather(first, c);
        first = c + 1;
      }
    for (idx_t c = 0; c < all; c += width<T>)
      sum_spreads(k, c, (std::min)(all, c + width<T>), one.past, scores.of(largest, offset), scores.factor(), gather);
  }

  matrix_view<const T> rest_keys(idx_t dim) const { return {rest.keys, slot_count, dim, rest.stride, 1}; }
  matrix_view<const T> rest_values(idx_t dim_v) const { return {rest.values, slot_count, dim_v, rest.stride_v, 1}; }

 private:
  static T log2_or_none(T count) { return count > T(0) ? std::log2(count) : -std::numeric_limits<T>::infinity(); }

  /// The logs of at most width<T> clusters whose ranks lie in `spread`; none of these is above `largest`.
  template <class S, class Gather>
  void sum_spreads(const multipole_keys<T, S>& k, idx_t first, idx_t last, idx_t past, T largest, T factor,
                   const Gather& gather) {
    const auto left = [&](idx_t c) { return slot[c] < 0 ? k.clusters.sums.counts[c] : rest.counts[slot[c]]; };
    const auto spreads_out = [&](idx_t c) { return left(c) > T(1) && ranked(k.o, past, c); };
    packet<T> powers[width<T>], distances[width<T>];
    for (idx_t n = 0; n < width<T>; ++n) {
      spread_lanes<T> lanes;
      if (const idx_t c = first + n; c < last && spreads_out(c)) {
        const idx_t begin = k.members.begins[c];
        lanes.add(spread + begin, k.members.begins[c + 1] - begin, largest, factor);
      }
      powers[n] = lanes.powers, distances[n] = lanes.distances;
    }
    alignas(64) T sums[width<T>], means[width<T>];
    store<T>(sums, sums_across<T>(powers));
    store<T>(means, sums_across<T>(distances));
    for (idx_t c = first; c < last; ++c) {
      const T count = left(c);
      spreads[c] = {};
      T& log = slot[c] < 0 ? far_logs[c] : logs[slot[c]];
      if (!spreads_out(c)) {
        if (slot[c] >= 0) log = log2_or_none(count);
        continue;
      }
      spreads[c] = {sums[c - first], means[c - first] / count};
      if (!spreads[c].has_all_digits()) {  // it is far below the keys taken
        gather(c, c + 1);
        const idx_t begin = k.members.begins[c];
        spreads[c] = spread_about_maximum(spread + begin, k.members.begins[c + 1] - begin, count, factor);
      }
      log = spreads[c].finite() ? spreads[c].log2_sum() : std::log2(count);
    }
  }

  template <class S>
  void leave_means(const multipole_keys<T, S>& k, idx_t past, bool without_logs) {
    constexpr T none = -std::numeric_limits<T>::infinity();
    const cluster_sums<T>& sums = k.clusters.sums;
    const idx_t all = k.o.clusters_before(past);
    const bool few = few_clusters_change(k.o, all);
    idx_t used = 0;
    const auto copy = [&](idx_t c) {
      std::copy_n(sums.key(c), sums.stride, rest.key(used));
      std::copy_n(sums.value(c), sums.stride_v, rest.value(used));
      rest.counts[used] = sums.counts[c];
      of_slot[used] = static_cast<cluster_number>(c);
      slot[c] = static_cast<cluster_number>(used++);
    };
    distant = few ? all : 0;
    if (few) {
      std::copy_n(k.far_logs, all, far_logs);
      std::fill_n(slot, all, cluster_number(-1));
    } else {
      for (idx_t c = 0; c < all; ++c) copy(c);
    }
    for (idx_t n = 0; n < taken && all > 0; ++n) {
      const idx_t j = chosen[n], c = k.cluster_of(j), next = chosen[(std::min)(n + 16, taken - 1)];
      for (const matrix_view<const S>& x : {k.key, k.value})
        prefetch_bytes<cache_level::first>(reinterpret_cast<const char*>(x.row(next)),
                                           x.cols * static_cast<idx_t>(sizeof(S)));
      if (slot[c] < 0) far_logs[c] = none, copy(c);
      const idx_t to = slot[c];
      add_row(rest.key(to), k.key, j, T(-1));
      add_row(rest.value(to), k.value, j, T(-1));
      rest.counts[to] -= T(1);
    }
    slot_count = round_up(used, panel_width<T>);
    for (idx_t r = 0; r < slot_count; ++r) {
      const T count = r < used ? rest.counts[r] : T(0);
      logs[r] = without_logs ? none : log2_or_none(count);
      const T factor = count > T(0) ? T(1) / count : T(0);
      const auto divide = [&](T* x, idx_t n) {
        for (idx_t d = 0; d < n; ++d) x[d] = count > T(0) ? x[d] * factor : T(0);
      };
      divide(rest.key(r), rest.stride);
      divide(rest.value(r), rest.stride_v);
      if (r >= used) rest.counts[r] = T(0), of_slot[r] = -1;
    }
  }

  template <class S>
  idx_t far_stride(const multipole_settings& o, const multipole_keys<T, S>& k) const {
    return round_up(o.segments(k.key.rows) * o.clusters, panel_width<T>);
  }
};

}}}  // namespace attn::ATTN_ISA::detail
