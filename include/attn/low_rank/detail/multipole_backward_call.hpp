// attn: the driver of multipole_backward: keys are clustered and chosen again; gradients of blocks of queries then go
// to the keys they take, to their own segment and to clusters, whose members share the gradient of their mean and have
// that of their spread. The latter goes to queries of other blocks too: gradients of queries are stored last.
//
// A part is a range of tasks of all heads of a key head, with separate sums; there are at most 8, depending on the
// shape alone.
#pragma once

#include <attn/core/detail/sums_in_parts.hpp>
#include <attn/low_rank/detail/multipole_call.hpp>
#include <attn/low_rank/detail/multipole_spread_backward.hpp>
#include <attn/low_rank/detail/panel_product.hpp>
#include <attn/softmax/detail/softmax_backward_call.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The sums of one part for every key, and for every member of a cluster. Null: not wanted.
template <class T>
struct multipole_part {
  T *d_keys = nullptr, *d_values = nullptr;          // [Lk + panel][]
  T *share_keys = nullptr, *share_values = nullptr;  // [clusters][]
  T *far_keys = nullptr, *far_values = nullptr;      // [clusters + panel][]: of clusters' means, where some stay whole
};

template <class T>
struct multipole_backward_head {
  multipole_head<T> clustered;
  backward_keys<T> far;
  multipole_part<T>* parts = nullptr;
  T *d_queries = nullptr, *d_means = nullptr;  // [group * Lq][], [group * blocks][]: of mean queries
};

template <class S, class Call>
struct multipole_backward_call {
  using T = compute_type<S>;
  using head = multipole_backward_head<T>;

  const Call& in;
  const multipole_clustering<S>& clustering;
  rank_scores<T> ranks = rank_scores<T>::of(in.terms());

  const attention_shape& shape() const { return in.shape; }
  const multipole_settings& o() const { return clustering.o; }
  idx_t keys(idx_t b) const { return in.lengths().keys(b); }
  idx_t queries(idx_t b) const { return in.lengths().queries(b); }
  idx_t stride() const { return backward_keys<T>::stride(shape().dim); }
  idx_t stride_v() const { return backward_keys<T>::stride(shape().dim_v); }
  idx_t tasks() const { return multipole_blocks::tasks(o(), shape().keys, shape().queries); }
  idx_t parts() const { return parts_of(shape().queries, std::clamp<idx_t>(tasks(), 1, 8)); }
  idx_t most_clusters() const { return o().segments(shape().keys) * o().clusters; }
  idx_t blocks() const { return tasks() * multipole_blocks::per_task(o()); }
  /// Whether clusters of the keys before `past` have a score of their spread whose gradient is wanted.
  bool with_spread(idx_t past) const {
    return cluster_members::used(o()) && o().exact < past && (in.dq || in.dk);
  }
  bool with_far() const { return few_clusters_change(o(), most_clusters()); }

  // Scratch -----------------------------------------------------------------------------------------------------------

  head layout(arena& memory) const {
    const idx_t rows = shape().keys + panel_width<T>, clusters = most_clusters(), far = clusters + panel_width<T>;
    head p;
    p.clustered = clustering.layout(memory);
    if (with_far()) p.far = backward_keys<T>::layout(memory, clusters, shape().dim, shape().dim_v, false, false);
    p.parts = memory.allocate_list(parts(), [&](arena& m) {
      multipole_part<T> part;
      if (in.dk) {
        part.d_keys = m.allocate<T>(rows * stride());
        part.share_keys = m.allocate<T>(clusters * stride());
        if (with_far()) part.far_keys = m.allocate<T>(far * stride());
      }
      if (in.dv) {
        part.d_values = m.allocate<T>(rows * stride_v());
        part.share_values = m.allocate<T>(clusters * stride_v());
        if (with_far()) part.far_values = m.allocate<T>(far * stride_v());
      }
      return part;
    });
    if (in.dq) {
      p.d_queries = memory.allocate<T>(shape().group() * shape().queries * stride());
      p.d_means = memory.allocate<T>(with_spread(shape().keys) ? shape().group() * blocks() * stride() : 0);
    }
    return p;
  }
  struct scratch {
    multipole_block<T> choice;
    backward_scratch<T> block;
    backward_rows<T> rows;
    backward_keys<T> near, own;
    spread_backward<T> spread;
    T* dq;  // [max_rows][stride]
  };
  scratch scratch_layout(arena& memory) const {
    const idx_t dim = shape().dim, dim_v = shape().dim_v, all = shape().keys;
    const idx_t near = multipole_block<T>::most_slots(o(), all) + multipole_block<T>::most_taken(o(), all);
    scratch s;
    s.choice = multipole_block<T>::layout(memory, o(), all, dim, dim_v);
    s.block = in.template layout_scratch<T>(memory);
    s.rows = backward_rows<T>::layout(memory, max_rows, dim, dim_v);
    s.near = backward_keys<T>::layout(memory, near, dim, dim_v, bool(in.dk), bool(in.dv));
    s.own = backward_keys<T>::layout(memory, o().causal ? std::min(o().segment, all) : 0, dim, dim_v, false, false);
    if (with_spread(all)) s.spread = spread_backward<T>::layout(memory, o(), all, dim);
    s.dq = memory.allocate<T>(max_rows * stride());
    return s;
  }

  // Queries -----------------------------------------------------------------------------------------------------------

  void pack_near(const multipole_keys<T, S>& k, const scratch& s) const {
    const multipole_block<T>& c = s.choice;
    backward_keys<T> near = s.near;
    if (c.slots > 0) {
      near.keys.positions = {};
      near.fill(c.rest_keys(shape().dim), c.rest_values(shape().dim_v), 0, c.slots);
    }
    if (c.taken > 0) {
      const idx_t end = c.slots + c.taken;
      near.keys.pack_keys([&](idx_t n) { return k.key.row(c.chosen[n]); }, k.key.col_stride, c.slots, end);
      near.keys.pack_value_rows([&](idx_t slot) { return k.key.row(c.chosen[slot - c.slots]); }, k.key.col_stride,
                                c.slots, end);
      near.values.pack_keys([&](idx_t n) { return k.value.row(c.chosen[n]); }, k.value.col_stride, c.slots, end);
    }
    near.clear(0, c.slots + c.taken);
  }

  /// Adds the sums of a block's own slots to those of the keys taken, and of the members that are left of clusters.
  static void scatter(const multipole_keys<T, S>& k, const multipole_block<T>& c, T* sums, idx_t row_stride, T* to_keys,
                      T* to_members) {
    if (!sums) return;
    for (idx_t r = 0; r < c.slots; ++r) {
      if (!(c.rest.counts[r] > T(0))) continue;
      T *const from = sums + r * row_stride, *const to = to_members + c.of_slot[r] * row_stride;
      const T factor = T(1) / c.rest.counts[r];
      for (idx_t d = 0; d < row_stride; ++d) from[d] *= factor, to[d] += from[d];
    }
    for (idx_t n = 0; n < c.taken; ++n) {
      constexpr idx_t distance = 16;
      prefetch_bytes<cache_level::first>(
          reinterpret_cast<const char*>(to_keys + c.chosen[std::min(n + distance, c.taken - 1)] * row_stride),
          row_stride * static_cast<idx_t>(sizeof(T)));
      const idx_t slot = c.slots > 0 ? c.slot[k.cluster_of(c.chosen[n])] : 0;
      const T *const from = sums + (c.slots + n) * row_stride, *const of_rest = sums + slot * row_stride;
      T* const to = to_keys + c.chosen[n] * row_stride;
      const bool left = c.slots > 0 && c.rest.counts[slot] > T(0);
      for (idx_t d = 0; d < row_stride; d += width<T>) {
        const packet<T> sum = add(load<T>(to + d), load<T>(from + d));
        store<T>(to + d, left ? sub(sum, load<T>(of_rest + d)) : sum);
      }
    }
  }

  /// Block number `number` of those ranked together.
  void block_back(const head& p, const multipole_part<T>& part, const multipole_keys<T, S>& k, const query_block& one,
                  idx_t number, idx_t b, idx_t h, scratch& s) const {
    s.choice.leave(k, one, number, ranks);
    pack_near(k, s);
    const idx_t shift = keys(b) - queries(b);
    const auto terms = in.terms().for_head(b, 0, 0);
    auto near_terms = terms, far_terms = terms;
    if (s.choice.slots > 0) near_terms.counts = {s.choice.logs, s.choice.slots, 0};
    far_terms.counts = {s.choice.far_logs, s.choice.far, 0};
    auto back = in.back(terms), near_back = in.back(near_terms), far_back = in.back(far_terms);
    const bool spread = with_spread(one.past);
    if (spread) {
      s.spread.clear(s.choice);
      near_back.d_counts = s.choice.slots > 0 ? s.spread.d_near : nullptr;
      far_back.d_counts = s.spread.d_far;
    }
    backward_keys<T> far = p.far;
    far.d_keys = part.far_keys, far.d_values = part.far_values;
    T* const d_queries = in.dq ? p.d_queries + h % shape().group() * shape().queries * stride() : nullptr;
    key_range ranges[max_rows];
    for (idx_t i = one.begin; i < one.end; i += max_rows) {
      const idx_t count = std::min(max_rows, one.end - i);
      const index_map which{i, 1, nullptr};
      // Of whole tiles: the rows beyond `count` are those of other blocks.
      T* const to = d_queries ? d_queries + i * stride() : nullptr, *const dq = to && count < max_rows ? s.dq : to;
      in.pack_rows(s.rows, b, h, head_of(in.q, b, h), which, count);
      if (dq) std::fill_n(dq, max_rows * stride(), T(0));
      const auto see = [&](idx_t slots) { std::fill_n(ranges, count, key_range{0, slots}); };
      if (s.choice.far > 0) {
        see(s.choice.far);
        differentiate(s.rows, count, ranges, which, far, far_terms, s.block, dq, stride(), far_back);
      }
      see(s.choice.slots + s.choice.taken);
      differentiate(s.rows, count, ranges, which, s.near, near_terms, s.block, dq, stride(), near_back);
      if (o().causal) {
        for (idx_t r = 0; r < count; ++r) ranges[r] = {0, i + r + shift + 1 - one.past};
        differentiate(s.rows, count, ranges, which, s.own, terms, s.block, dq, stride(), back);
      }
      if (dq != to) std::copy_n(dq, count * stride(), to);
    }
    if (spread) {
      if (s.spread.full()) s.spread.flush(k, part.d_keys);
      s.spread.collect(k, s.choice, number, ranks, one.past,
                       in.dq ? d_mean(p, h % shape().group(), one) : nullptr);
    }
    scatter(k, s.choice, s.near.d_keys, stride(), part.d_keys, part.share_keys);
    scatter(k, s.choice, s.near.d_values, stride_v(), part.d_values, part.share_values);
  }

  void part_back(const head& p, idx_t b, idx_t kv, idx_t n, execution& exec, int worker) const {
    const multipole_part<T>& part = p.parts[n];
    const idx_t rows = shape().keys + panel_width<T>, clusters = most_clusters(), far = clusters + panel_width<T>;
    const auto clear = [](T* x, idx_t count) {
      if (x) std::fill_n(x, count, T(0));
    };
    clear(part.d_keys, rows * stride()), clear(part.d_values, rows * stride_v());
    clear(part.share_keys, clusters * stride()), clear(part.share_values, clusters * stride_v());
    clear(part.far_keys, far * stride()), clear(part.far_values, far * stride_v());
    scratch s = exec.scratch(worker, [&](arena& memory) { return scratch_layout(memory); });
    const multipole_keys<T, S> k = clustering.keys_of(p.clustered, b, kv);
    for (idx_t task = segment_begin(n, tasks(), parts()); task < segment_begin(n + 1, tasks(), parts()); ++task) {
      bool packed = !o().causal;
      for (idx_t h = kv * shape().group(); h < (kv + 1) * shape().group(); ++h)
        multipole_blocks{o(), keys(b), queries(b)}.visit_task(task, [&](const query_block* blocks, idx_t count) {
          if (!packed) {
            packed = true;
            const idx_t begin = task * o().segment;
            s.own.keys.positions = {begin, 1, nullptr};
            s.own.fill(k.key, k.value, 0, std::min(o().segment, keys(b) - begin));
            s.own.d_keys = part.d_keys ? part.d_keys + begin * stride() : nullptr;
            s.own.d_values = part.d_values ? part.d_values + begin * stride_v() : nullptr;
          }
          s.choice.rank(k, head_of(in.q, b, h), blocks, count, ranks.sign);
          for (idx_t c = 0; c < count; ++c) {
            s.choice.choose(k, blocks[c], c);
            block_back(p, part, k, blocks[c], c, b, h, s);
          }
        });
    }
    s.spread.flush(k, part.d_keys);
    for (idx_t c = 0; c < clusters && with_far(); ++c) {
      const T count = p.clustered.clusters.sums.counts[c];
      if (c >= o().segments(keys(b)) * o().clusters || !(count > T(0))) continue;
      const auto divide = [&](const T* from, T* to, idx_t numbers) {
        for (idx_t d = 0; from && d < numbers; ++d) to[c * numbers + d] += from[c * numbers + d] / count;
      };
      divide(part.far_keys, part.share_keys, stride());
      divide(part.far_values, part.share_values, stride_v());
    }
  }

  // Keys --------------------------------------------------------------------------------------------------------------

  /// Adds up the parts for keys [begin, end), into the first one, and stores the result.
  void store_keys(const head& p, idx_t b, idx_t kv, idx_t begin, idx_t end) const {
    const multipole_keys<T, S> k = clustering.keys_of(p.clustered, b, kv);
    const idx_t clustered = o().clusters > 0 ? o().segments(keys(b)) * o().segment_keys(keys(b)) : 0;
    const auto store = [&](const tensor_view<S>& to, T* multipole_part<T>::*sums, T* multipole_part<T>::*share,
                           idx_t numbers, T factor) {
      if (!to) return;
      for (idx_t j = begin; j < std::min(end, keys(b)); ++j) {
        T* const row = p.parts[0].*sums + j * numbers;
        for (idx_t n = 0; n < parts(); ++n) {
          const multipole_part<T>& part = p.parts[n];
          for (idx_t d = 0; n > 0 && d < numbers; ++d) row[d] += (part.*sums)[j * numbers + d];
          if (j >= clustered) continue;
          const T* const of_cluster = part.*share + k.cluster_of(j) * numbers;
          for (idx_t d = 0; d < numbers; ++d) row[d] += of_cluster[d];
        }
      }
      store_gradient_rows(p.parts[0].*sums, numbers, factor, head_of(to, b, kv), begin, end, keys(b), in.accumulate);
    };
    store(in.dk, &multipole_part<T>::d_keys, &multipole_part<T>::share_keys, stride(), in.terms().scale);
    store(in.dv, &multipole_part<T>::d_values, &multipole_part<T>::share_values, stride_v(), T(1));
  }

  T* d_mean(const head& p, idx_t of_group, const query_block& one) const {
    return p.d_means + (of_group * blocks() + one.number) * stride();
  }

  /// Adds the gradients of the mean queries to those of their queries, which may themselves see no key, and stores
  /// these; zeros for padding.
  void store_queries(const head& p, idx_t b, idx_t h) const {
    const idx_t blind = o().causal ? std::clamp<idx_t>(queries(b) - keys(b), 0, queries(b)) : 0;
    const idx_t of_group = h % shape().group();
    T* const rows = p.d_queries + of_group * shape().queries * stride();
    std::fill_n(rows, blind * stride(), T(0));
    for (idx_t task = 0; task < tasks(); ++task)
      multipole_blocks{o(), keys(b), queries(b)}.visit_task(task, [&](const query_block* list, idx_t count) {
        for (const query_block* one = list; one < list + count; ++one) {
          if (!with_spread(one->past)) continue;
          const T* const mean = d_mean(p, of_group, *one);
          const T share = T(1) / static_cast<T>(one->probe_end - one->probe_begin);
          for (idx_t i = one->probe_begin; i < one->probe_end; ++i)
            for (idx_t d = 0; d < shape().dim; ++d) rows[i * stride() + d] += mean[d] * share;
        }
      });
    for (idx_t i = 0; i < shape().queries; ++i)
      store_gradient_row(i < queries(b) ? rows + i * stride() : nullptr, in.terms().scale, head_of(in.dq, b, h), i,
                         in.accumulate);
  }

  void run_wave(const wave<head>& w) const {
    constexpr idx_t step_keys = 512;
    const idx_t heads = shape().kv_heads;
    clustering.run(w);
    if (with_far())
      for_each_head(w, heads, 1, [&](const head& p, idx_t b, idx_t, idx_t, int) {
        const idx_t rows = o().segments(keys(b)) * o().clusters;
        const auto& sums = p.clustered.clusters.sums;
        backward_keys<T> far = p.far;
        if (rows > 0)
          far.fill(matrix_view<const T>{clustering.mean(p.clustered, 0), rows, shape().dim, sums.stride, 1},
                   matrix_view<const T>{clustering.value_mean(p.clustered, 0), rows, shape().dim_v, sums.stride_v, 1}, 0,
                   rows);
      });
    for_each_head(w, heads, parts(), [&](const head& p, idx_t b, idx_t kv, idx_t n, int worker) {
      part_back(p, b, kv, n, w.exec, worker);
    });
    for_each_head(w, heads, ceil_div(shape().keys, step_keys), [&](const head& p, idx_t b, idx_t kv, idx_t n, int) {
      store_keys(p, b, kv, n * step_keys, std::min((n + 1) * step_keys, shape().keys));
    });
    for_each_head(w, heads, in.dq ? shape().group() : 0, [&](const head& p, idx_t b, idx_t kv, idx_t g, int) {
      store_queries(p, b, kv * shape().group() + g);
    });
  }

  void run(execution& exec) const {
    if (!in.dq && !in.dk && !in.dv) return;
    const idx_t item_heads = shape().batch * shape().kv_heads;
    for_each_wave(
        exec, item_heads, [&](arena& memory) { return layout(memory); }, [&](const wave<head>& w) { run_wave(w); });
  }
};

}}}  // namespace attn::ATTN_ISA::detail
