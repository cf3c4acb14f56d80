// attn: the driver of multipole: keys are clustered, then blocks of queries choose, and attend to the keys they take,
// to clusters and, in the causal form, to their own segment.
#pragma once

#include <attn/low_rank/detail/attend_rows.hpp>
#include <attn/low_rank/detail/multipole_block.hpp>
#include <attn/softmax/detail/softmax_call.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Memory that the threads share for one head of keys.
template <class T>
struct multipole_head {
  multipole_clusters<T> clusters;
  cluster_members members;
  packed_keys<T> distant;     // the clusters' means, where some blocks see clusters that lost no key
  T* far_logs = nullptr;  // [segments * clusters]
};

/// The keys of a call, and how they are clustered: in steps whose tasks are independent. Forward and backward passes
/// alike.
template <class S>
struct multipole_clustering {
  using T = compute_type<S>;

  multipole_settings o;
  tensor_view<const S> k, v;
  tensor_view<const idx_t, 3> assignment;
  attention_shape shape;
  sequence_lengths lengths;

  /// Multiplications and additions, roughly.
  double operations() const {
    const double queries = static_cast<double>(shape.queries), keys = static_cast<double>(shape.keys),
                 clusters = static_cast<double>(o.segments(shape.keys) * o.clusters),
                 own = o.causal ? static_cast<double>((std::min)(o.segment, shape.keys)) : 0;
    const double taken = static_cast<double>(multipole_block<T>::most_taken(o, shape.keys));
    return shape.operations_per_score() * (queries * (taken + clusters + own) + keys * queries / 64) +
           keys * static_cast<double>(shape.batch * shape.kv_heads * o.clusters * (o.iterations + 1) * shape.dim);
  }

  idx_t most_segments() const { return o.segments(shape.keys); }
  /// Whether any block sees clusters that lost no key, or chooses among clusters.
  bool with_far() const {
    return few_clusters_change(o, most_segments() * o.clusters) || (o.candidate_clusters > 0 && o.clusters > 0);
  }
  multipole_head<T> layout(arena& memory) const {
    const idx_t rows = most_segments() * o.clusters;
    multipole_head<T> p;
    p.clusters = multipole_clusters<T>::layout(memory, o, shape.keys, shape.dim, shape.dim_v);
    p.members = cluster_members::layout<T>(memory, o, shape.keys);
    if (with_far()) {
      p.distant = packed_keys<T>::layout(memory, rows, shape.dim, shape.dim_v);
      p.far_logs = memory.allocate<T>(rows);
    }
    return p;
  }
  multipole_keys<T, S> keys_of(const multipole_head<T>& p, idx_t b, idx_t kv) const {
    return {o, p.clusters, p.members, head_of(k, b, kv), head_of(v, b, kv), p.far_logs, p.distant.keys};
  }

  /// Key heads are counted over all batch items: b * kv_heads + kv. A Head is a multipole_head.
  template <class Head>
  void run(const wave<Head>& w) const {
    constexpr idx_t pack_step = 512;
    const auto item = [&](idx_t item_head) { return item_head / shape.kv_heads; };
    const auto key = [&](idx_t item_head) { return head_of(k, item(item_head), item_head % shape.kv_heads); };
    const auto scratch = [&](int worker) {
      return w.exec.scratch(worker, [&](arena& memory) {
        return cluster_scratch<T>::layout(memory, o.clusters, shape.dim, shape.dim_v, o.segment_keys(shape.keys));
      });
    };
    if (most_segments() == 0) return;
    w.for_each(ceil_div(shape.keys, pack_step), [&](idx_t item_head, const multipole_head<T>& p, idx_t step, int) {
      const idx_t begin = step * pack_step, n = (std::min)(pack_step, lengths.keys(item(item_head)) - begin);
      const auto rows = key(item_head);
      if (n > 0)
        pack_panels_across<T>([&](idx_t j) { return rows.row(begin + j); }, n, shape.dim, rows.col_stride,
                              p.clusters.panels + begin * shape.dim);
    });
    const auto keys_in = [&](idx_t item_head) { return lengths.keys(item(item_head)); };
    const auto iterates = [&](idx_t n) { return multipole_clusters<T>::iterates(o, n); };
    if (o.clusters > 0)
      w.for_each(most_segments(), [&](idx_t item_head, const multipole_head<T>& p, idx_t segment, int worker) {
        const idx_t n = keys_in(item_head);
        if (segment < o.segments(n) && iterates(n))
          p.clusters.start(o, key(item_head), n, segment, segment, scratch(worker));
      });
    for (idx_t step = 0; o.clusters > 0 && step <= o.iterations; ++step) {
      const bool last = step == o.iterations;
      w.for_each(o.parts(shape.keys), [&](idx_t item_head, const multipole_head<T>& p, idx_t part, int worker) {
        const idx_t n = keys_in(item_head);
        if (part >= o.parts(n) || (!iterates(n) && !last)) return;
        if (iterates(n))
          p.clusters.assign(o, shape.dim, n, part, scratch(worker));
        else
          take_assignment(p.clusters, item_head, n, part);
        const auto value = head_of(v, item(item_head), item_head % shape.kv_heads);
        p.clusters.add_part(o, key(item_head), last ? &value : nullptr, n, part, scratch(worker).some);
      });
      w.for_each(most_segments(), [&](idx_t item_head, const multipole_head<T>& p, idx_t segment, int) {
        const idx_t n = keys_in(item_head);
        if (segment < o.segments(n) && (last || iterates(n))) p.clusters.merge(o, n, segment, last);
      });
    }
    w.for_each(1, [&](idx_t item_head, const multipole_head<T>& p, idx_t, int) {
      const idx_t n = lengths.keys(item(item_head)), rows = o.segments(n) * o.clusters;
      p.clusters.sum_before(o, key(item_head), n);
      p.members.fill(o, p.clusters, n);
      if (!with_far() || rows == 0) return;
      // Means overwrite the centres, which no later step reads; means of values overwrite the parts.
      for (idx_t r = 0; r < rows; ++r) {
        const T count = p.clusters.sums.counts[r], factor = count > T(0) ? T(1) / count : T(0);
        p.far_logs[r] = count > T(0) ? std::log2(count) : -std::numeric_limits<T>::infinity();
        divide(p.clusters.sums.key(r), p.clusters.sums.stride, factor, mean(p, r));
        divide(p.clusters.sums.value(r), p.clusters.sums.stride_v, factor, value_mean(p, r));
      }
      packed_keys<T> distant = p.distant;
      distant.pack(matrix_view<const T>{p.clusters.centres, rows, shape.dim, p.clusters.sums.stride, 1},
               matrix_view<const T>{p.clusters.parts.values, rows, shape.dim_v, p.clusters.sums.stride_v, 1}, 0, rows,
                   packed_keys<T>::wide);  // ranks read whole panels
    });
  }

  T* mean(const multipole_head<T>& p, idx_t r) const { return p.clusters.centres + r * p.clusters.sums.stride; }
  T* value_mean(const multipole_head<T>& p, idx_t r) const { return p.clusters.parts.value(r); }

 private:
  static void divide(const T* from, idx_t n, T factor, T* to) {
    for (idx_t d = 0; d < n; ++d) to[d] = factor == T(0) ? T(0) : from[d] * factor;
  }

  /// The caller's assignment, or every key as its own cluster.
  void take_assignment(const multipole_clusters<T>& c, idx_t item_head, idx_t n, idx_t part) const {
    const auto [begin, end] = c.part_keys(o, n, part);
    for (idx_t j = begin; j < end; ++j)
      c.cluster[j] = static_cast<cluster_number>(
          assignment ? assignment(item_head / shape.kv_heads, item_head % shape.kv_heads, j) : j % o.segment_keys(n));
  }
};

template <class S>
struct multipole_driver {
  using T = compute_type<S>;

  const softmax_call<S, no_score>& in;
  const multipole_clustering<S>& clustering;
  const multipole_settings& o = clustering.o;
  rank_scores<T> ranks = rank_scores<T>::of(in.terms);

  const attention_shape& shape() const { return in.shape; }

  struct scratch {
    multipole_block<T> choice;
    row_block<T> rows;
    packed_keys<T> nearby, own;
  };
  scratch layout(arena& memory) const {
    const idx_t dim = shape().dim, dim_v = shape().dim_v, keys = shape().keys;
    const idx_t nearby = multipole_block<T>::most_slots(o, keys) + multipole_block<T>::most_taken(o, keys);
    return {multipole_block<T>::layout(memory, o, keys, dim, dim_v), row_block<T>::layout(memory, dim, dim_v),
            packed_keys<T>::layout(memory, nearby, dim, dim_v),
            packed_keys<T>::layout(memory, o.causal ? (std::min)(o.segment, keys) : 0, dim, dim_v)};
  }

  /// Packs the slots of a block: its own clusters, then the keys it takes.
  static void pack_near(const multipole_keys<T, S>& k, const multipole_block<T>& c, packed_keys<T>& nearby) {
    if (c.slot_count > 0) nearby.pack(c.rest_keys(nearby.dim), c.rest_values(nearby.dim_v), 0, c.slot_count);
    if (c.taken == 0) return;
    nearby.pack_keys([&](idx_t n) { return k.key.row(c.chosen[n]); }, k.key.col_stride, c.slot_count,
                     c.slot_count + c.taken);
    nearby.pack_value_rows([&](idx_t slot) { return k.value.row(c.chosen[slot - c.slot_count]); }, k.value.col_stride,
                           c.slot_count, c.slot_count + c.taken);
  }

  void attend_block(const multipole_keys<T, S>& k, const packed_keys<T>& distant, const query_block& one, idx_t b,
                    idx_t h, scratch& s) const {
    pack_near(k, s.choice, s.nearby);
    auto far_terms = in.terms.for_head(b, 0, 0), near_terms = far_terms;
    far_terms.counts = {s.choice.far_logs, s.choice.distant, 0};
    if (s.choice.slot_count > 0) near_terms.counts = {s.choice.logs, s.choice.slot_count, 0};
    const idx_t shift = in.shift(b);
    for (idx_t i = one.begin; i < one.end; i += max_rows) {
      const idx_t count = (std::min)(max_rows, one.end - i);
      s.rows.begin(in.query(b, h), {i, 1, nullptr}, count, in.terms.query_factor());
      const auto see = [&](idx_t slot_count) { std::fill_n(s.rows.ranges, count, key_range{0, slot_count}); };
      if (s.choice.distant > 0) {
        see(s.choice.distant);
        attend(s.rows, distant, far_terms);
      }
      see(s.choice.slot_count + s.choice.taken);
      attend(s.rows, s.nearby, near_terms);
      if (o.causal) {
        for (idx_t r = 0; r < count; ++r) s.rows.ranges[r] = {0, i + r + shift + 1 - one.past};
        attend(s.rows, s.own, in.terms);
      }
      in.finish(s.rows, b, h);
    }
  }

  /// The first `count` rows, which see no key: their denominator is the sink's.
  void clear_unseeing(idx_t b, idx_t h, idx_t count) const {
    clear_rows(in.result(b, h), idx_t(0), count, row_of(in.lse, b, h), in.lse.stride(2));
    const T* const sink = per_head<T>(in.sinks, h);
    if (!in.lse || !sink || *sink == -std::numeric_limits<T>::infinity()) return;
    for (idx_t i = 0; i < count; ++i) {
      in.lse(b, h, i) = in.maximum ? T(0) : *sink;
      if (in.maximum) in.maximum(b, h, i) = to_base_2(*sink);
    }
  }

  void run_task(const multipole_head<T>& p, idx_t b, idx_t h, idx_t task, scratch& s) const {
    const idx_t n = in.lengths.keys(b), queries = in.lengths.queries(b);
    const multipole_keys<T, S> k = clustering.keys_of(p, b, h / shape().group());
    if (task == 0) {
      clear_unseeing(b, h, o.causal ? std::clamp<idx_t>(queries - n, 0, queries) : 0);
      in.clear_padding(b, h);
    }
    bool packed = !o.causal;
    multipole_blocks{o, n, queries}.visit_task(task, [&](const query_block* blocks, idx_t count) {
      if (!packed) {
        packed = true;
        const idx_t begin = task * o.segment;
        s.own.positions = {begin, 1, nullptr};
        s.own.pack(k.key, k.value, 0, (std::min)(o.segment, n - begin));
      }
      s.choice.rank(k, in.query(b, h), blocks, count, ranks.sign);
      for (idx_t c = 0; c < count; ++c) {
        s.choice.choose(k, blocks[c], c);
        s.choice.leave(k, blocks[c], c, ranks);
        attend_block(k, p.distant, blocks[c], b, h, s);
      }
    });
  }

  void run() const {
    const auto limit = in.exec.limit_threads({.operations = clustering.operations()});
    const idx_t group = shape().group();
    const idx_t tasks = std::max<idx_t>(1, multipole_blocks::tasks(o, shape().keys, shape().queries));
    const auto layout_item = [&](arena& memory) { return clustering.layout(memory); };
    for (const auto& w : waves_of(in.exec, shape().batch * shape().kv_heads, layout_item)) {
      clustering.run(w);
      // In causal calls the last tasks are the longest: they go first.
      w.for_each(tasks * group, [&](idx_t item_head, const multipole_head<T>& p, idx_t step, int worker) {
        auto s = in.exec.scratch(worker, [&](arena& memory) { return layout(memory); });
        const idx_t b = item_head / shape().kv_heads, h = item_head % shape().kv_heads * group + step % group;
        run_task(p, b, h, tasks - 1 - step / group, s);
      });
    }
  }
};

template <class S>
void run_multipole(const softmax_call<S, no_score>& call, const multipole_clustering<S>& clustering) {
  multipole_driver<S>{call, clustering}.run();
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN(S) void run_multipole(const softmax_call<S, no_score>&, const multipole_clustering<S>&)
#include <attn/core/detail/compiled.hpp>
