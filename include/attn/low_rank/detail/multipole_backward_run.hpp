// attn: the driver of multipole_backward: keys are clustered and chosen again; gradients of blocks of queries then go
// to the keys they take, to their own segment and to clusters, whose members share the gradient of their mean and have
// that of their spread. The latter goes to queries of other blocks too: gradients of queries are stored last.
//
// A part is a range of tasks of all heads of a key head, with separate sums; there are at most 8, depending on the
// shape alone. Where there are at least twice as many threads as parts, gradients of queries, keys and values of a part
// have tasks of their own: these choose and compute scores again, but all sums as before.
#pragma once

#include <attn/core/detail/sums_in_parts.hpp>
#include <attn/low_rank/detail/multipole_run.hpp>
#include <attn/low_rank/detail/multipole_spread_backward.hpp>
#include <attn/low_rank/detail/panel_product.hpp>
#include <attn/softmax/detail/softmax_backward_call.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The sums of one part, of keys or of values: for every one, and for every member of a cluster. Null: not wanted.
template <class T>
struct multipole_part {
  T* rows = nullptr;   // [Lk + panel][]
  T* share = nullptr;  // [clusters][]
  T* distant = nullptr;    // [clusters + panel][]: of clusters' means, where some stay whole
};

template <class T>
struct multipole_backward_head : multipole_head<T> {
  backward_keys<T> far_back;  // the means that are packed as `far`
  multipole_part<T>* parts[2] = {};  // of keys, of values
  T *d_queries = nullptr, *d_means = nullptr;  // [group * Lq][], [group * blocks][]: of mean queries
};

template <class S>
struct multipole_backward_driver {
  using T = compute_type<S>;
  using head = multipole_backward_head<T>;

  const softmax_backward_call<S, no_score, no_score_backward>& in;
  const multipole_clustering<S>& clustering;
  rank_scores<T> ranks = rank_scores<T>::of(in.terms());
  idx_t sides = 1;  // tasks of each part: dQ | dK | dV, or dQ and dK | dV

  const attention_shape& shape() const { return in.shape; }
  const multipole_settings& o() const { return clustering.o; }
  idx_t keys(idx_t b) const { return in.lengths().keys(b); }
  idx_t queries(idx_t b) const { return in.lengths().queries(b); }
  idx_t stride(int side = 0) const { return backward_keys<T>::stride(side ? shape().dim_v : shape().dim); }
  const tensor_view<S>& gradient(int side) const { return side ? in.dv : in.dk; }
  idx_t rows() const { return shape().keys + panel_width<T>; }
  idx_t far_rows() const { return with_far() ? most_clusters() + panel_width<T> : 0; }
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
    head p;
    static_cast<multipole_head<T>&>(p) = clustering.layout(memory);
    if (with_far())
      p.far_back = backward_keys<T>::layout(memory, most_clusters(), shape().dim, shape().dim_v, false, false);
    for (const int side : {0, 1})
      p.parts[side] = memory.allocate_list(parts(), [&](arena& m) {
        multipole_part<T> part;
        if (gradient(side))
          part = {m.allocate<T>(rows() * stride(side)), m.allocate<T>(most_clusters() * stride(side)),
                  m.allocate<T>(far_rows() * stride(side))};
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
    backward_keys<T> nearby, own;
    spread_backward<T> spread;
    T* dq;  // [max_rows][stride]
  };
  scratch scratch_layout(arena& memory) const {
    const idx_t dim = shape().dim, dim_v = shape().dim_v, all = shape().keys;
    const idx_t nearby = multipole_block<T>::most_slots(o(), all) + multipole_block<T>::most_taken(o(), all);
    scratch s;
    s.choice = multipole_block<T>::layout(memory, o(), all, dim, dim_v);
    s.block = in.template layout_scratch<T>(memory);
    s.rows = backward_rows<T>::layout(memory, max_rows, dim, dim_v);
    s.nearby = backward_keys<T>::layout(memory, nearby, dim, dim_v, bool(in.dk), bool(in.dv));
    s.own = backward_keys<T>::layout(memory, o().causal ? (std::min)(o().segment, all) : 0, dim, dim_v, false, false);
    if (with_spread(all)) s.spread = spread_backward<T>::layout(memory, o(), all, dim);
    s.dq = memory.allocate<T>(max_rows * stride());
    return s;
  }

  // Queries -----------------------------------------------------------------------------------------------------------

  void pack_near(const multipole_keys<T, S>& k, const scratch& s) const {
    const multipole_block<T>& c = s.choice;
    backward_keys<T> nearby = s.nearby;
    if (c.slot_count > 0) {
      nearby.keys.positions = {};
      nearby.fill(c.rest_keys(shape().dim), c.rest_values(shape().dim_v), 0, c.slot_count);
    }
    if (c.taken > 0) {
      const idx_t end = c.slot_count + c.taken;
      nearby.keys.pack_keys([&](idx_t n) { return k.key.row(c.chosen[n]); }, k.key.col_stride, c.slot_count, end);
      nearby.keys.pack_value_rows([&](idx_t slot) { return k.key.row(c.chosen[slot - c.slot_count]); },
                                  k.key.col_stride, c.slot_count, end);
      nearby.values.pack_keys([&](idx_t n) { return k.value.row(c.chosen[n]); }, k.value.col_stride, c.slot_count, end);
    }
    nearby.clear(0, c.slot_count + c.taken);
  }

  /// Adds the sums of a block's own slots to those of the keys taken, and of the members that are left of clusters.
  static void scatter(const multipole_keys<T, S>& k, const multipole_block<T>& c, T* sums, idx_t row_stride,
                      const multipole_part<T>& part) {
    if (!sums) return;
    for (idx_t r = 0; r < c.slot_count; ++r) {
      if (!(c.rest.counts[r] > T(0))) continue;
      T *const from = sums + r * row_stride, *const to = part.share + c.of_slot[r] * row_stride;
      const T factor = T(1) / c.rest.counts[r];
      for (idx_t d = 0; d < row_stride; ++d) from[d] *= factor, to[d] += from[d];
    }
    for (idx_t n = 0; n < c.taken; ++n) {
      constexpr idx_t distance = 16;
      prefetch_bytes<cache_level::first>(
          reinterpret_cast<const char*>(part.rows + c.chosen[(std::min)(n + distance, c.taken - 1)] * row_stride),
          row_stride * static_cast<idx_t>(sizeof(T)));
      const idx_t slot = c.slot_count > 0 ? c.slot[k.cluster_of(c.chosen[n])] : 0;
      const T *const from = sums + (c.slot_count + n) * row_stride, *const of_rest = sums + slot * row_stride;
      T* const to = part.rows + c.chosen[n] * row_stride;
      const bool left = c.slot_count > 0 && c.rest.counts[slot] > T(0);
      for (idx_t d = 0; d < row_stride; d += width<T>) {
        const packet<T> sum = add(load<T>(to + d), load<T>(from + d));
        store<T>(to + d, left ? sub(sum, load<T>(of_rest + d)) : sum);
      }
    }
  }

  /// Block number `number` of those ranked together; `parts` are the sums of keys and of values.
  void block_back(const head& p, const multipole_part<T>* parts, bool of_rows, const multipole_keys<T, S>& k,
                  const query_block& one, idx_t number, idx_t b, idx_t h, scratch& s) const {
    s.choice.leave(k, one, number, ranks);
    pack_near(k, s);
    const idx_t shift = keys(b) - queries(b);
    const auto terms = in.terms().for_head(b, 0, 0);
    auto near_terms = terms, far_terms = terms;
    if (s.choice.slot_count > 0) near_terms.counts = {s.choice.logs, s.choice.slot_count, 0};
    far_terms.counts = {s.choice.far_logs, s.choice.distant, 0};
    auto back = in.back(terms), near_back = in.back(near_terms), far_back = in.back(far_terms);
    const bool spread = with_spread(one.past) && (of_rows || parts[0].rows);
    if (spread) {
      s.spread.clear(s.choice);
      near_back.d_counts = s.choice.slot_count > 0 ? s.spread.d_near : nullptr;
      far_back.d_counts = s.spread.d_far;
    }
    backward_keys<T> distant = p.far_back;
    distant.d_keys = parts[0].distant, distant.d_values = parts[1].distant;
    T* const d_queries = of_rows ? p.d_queries + h % shape().group() * shape().queries * stride() : nullptr;
    key_range ranges[max_rows];
    for (idx_t i = one.begin; i < one.end; i += max_rows) {
      const idx_t count = (std::min)(max_rows, one.end - i);
      const index_map which{i, 1, nullptr};
      // Of whole tiles: the rows beyond `count` are those of other blocks.
      T* const to = d_queries ? d_queries + i * stride() : nullptr, *const dq = to && count < max_rows ? s.dq : to;
      in.pack_rows(s.rows, b, h, head_of(in.q, b, h), which, count);
      if (dq) std::fill_n(dq, max_rows * stride(), T(0));
      const auto see = [&](idx_t slot_count) { std::fill_n(ranges, count, key_range{0, slot_count}); };
      if (s.choice.distant > 0) {
        see(s.choice.distant);
        differentiate(s.rows, count, ranges, which, distant, far_terms, s.block, dq, stride(), far_back);
      }
      see(s.choice.slot_count + s.choice.taken);
      differentiate(s.rows, count, ranges, which, s.nearby, near_terms, s.block, dq, stride(), near_back);
      if (o().causal) {
        for (idx_t r = 0; r < count; ++r) ranges[r] = {0, i + r + shift + 1 - one.past};
        differentiate(s.rows, count, ranges, which, s.own, terms, s.block, dq, stride(), back);
      }
      if (dq != to) std::copy_n(dq, count * stride(), to);
    }
    if (spread) {
      if (s.spread.full()) s.spread.flush(k, parts[0].rows);
      s.spread.collect(k, s.choice, number, ranks, one.past,
                       of_rows ? d_mean(p, h % shape().group(), one) : nullptr);
    }
    scatter(k, s.choice, s.nearby.d_keys, stride(0), parts[0]);
    scatter(k, s.choice, s.nearby.d_values, stride(1), parts[1]);
  }

  void part_back(const head& p, idx_t b, idx_t kv, idx_t step, int worker) const {
    const idx_t clusters = most_clusters(), n = step % parts(), only = step / parts();
    const bool of_rows = in.dq && only == 0, of_values = only == sides - 1, of_keys = only == (sides < 3 ? 0 : 1);
    multipole_part<T> all[2];
    if (of_keys) all[0] = p.parts[0][n];
    if (of_values) all[1] = p.parts[1][n];
    for (const int side : {0, 1}) {
      const multipole_part<T>& part = all[side];
      const idx_t numbers = part.rows ? stride(side) : 0;
      std::fill_n(part.rows, rows() * numbers, T(0)), std::fill_n(part.share, clusters * numbers, T(0));
      std::fill_n(part.distant, far_rows() * numbers, T(0));
    }
    T *const d_keys = all[0].rows, *const d_values = all[1].rows;
    scratch s = in.forward.exec.scratch(worker, [&](arena& memory) { return scratch_layout(memory); });
    if (!d_keys) s.nearby.d_keys = nullptr;
    if (!d_values) s.nearby.d_values = nullptr;
    const multipole_keys<T, S> k = clustering.keys_of(p, b, kv);
    for (idx_t task = segment_begin(n, tasks(), parts()); task < segment_begin(n + 1, tasks(), parts()); ++task) {
      bool packed = !o().causal;
      for (idx_t h = kv * shape().group(); h < (kv + 1) * shape().group(); ++h)
        multipole_blocks{o(), keys(b), queries(b)}.visit_task(task, [&](const query_block* blocks, idx_t count) {
          if (!packed) {
            packed = true;
            const idx_t begin = task * o().segment;
            s.own.keys.positions = {begin, 1, nullptr};
            s.own.fill(k.key, k.value, 0, (std::min)(o().segment, keys(b) - begin));
            s.own.d_keys = d_keys ? d_keys + begin * stride(0) : nullptr;
            s.own.d_values = d_values ? d_values + begin * stride(1) : nullptr;
          }
          s.choice.rank(k, head_of(in.q, b, h), blocks, count, ranks.sign);
          for (idx_t c = 0; c < count; ++c) {
            s.choice.choose(k, blocks[c], c);
            block_back(p, all, of_rows, k, blocks[c], c, b, h, s);
          }
        });
    }
    s.spread.flush(k, d_keys);
    for (idx_t c = 0; c < clusters && with_far(); ++c) {
      const T count = p.clusters.sums.counts[c];
      if (c >= o().segments(keys(b)) * o().clusters || !(count > T(0))) continue;
      for (const int side : {0, 1}) {
        const multipole_part<T>& part = all[side];
        const idx_t numbers = part.distant ? stride(side) : 0;
        for (idx_t d = c * numbers; d < (c + 1) * numbers; ++d) part.share[d] += part.distant[d] / count;
      }
    }
  }

  // Keys --------------------------------------------------------------------------------------------------------------

  static constexpr idx_t key_step = 512;

  /// Adds up the parts for some keys, into the first one, and stores the result.
  void store_keys(const head& p, idx_t b, idx_t kv, idx_t step, int) const {
    const idx_t begin = step * key_step, end = (std::min)(begin + key_step, shape().keys);
    const multipole_keys<T, S> k = clustering.keys_of(p, b, kv);
    const idx_t clustered = o().clusters > 0 ? o().segments(keys(b)) * o().segment_keys(keys(b)) : 0;
    for (const int side : {0, 1}) {
      if (!gradient(side)) continue;
      const idx_t numbers = stride(side);
      const multipole_part<T>* const all = p.parts[side];
      for (idx_t j = begin; j < (std::min)(end, keys(b)); ++j) {
        T* const row = all[0].rows + j * numbers;
        for (idx_t n = 0; n < parts(); ++n) {
          for (idx_t d = 0; n > 0 && d < numbers; ++d) row[d] += all[n].rows[j * numbers + d];
          if (j >= clustered) continue;
          const T* const of_cluster = all[n].share + k.cluster_of(j) * numbers;
          for (idx_t d = 0; d < numbers; ++d) row[d] += of_cluster[d];
        }
      }
      store_gradient_rows(all[0].rows, numbers, side ? T(1) : in.terms().scale, head_of(gradient(side), b, kv), begin,
                          end, keys(b), in.accumulate);
    }
  }

  T* d_mean(const head& p, idx_t of_group, const query_block& one) const {
    return p.d_means + (of_group * blocks() + one.number) * stride();
  }

  /// Adds the gradients of the mean queries to those of their queries, which may themselves see no key, and stores
  /// these; zeros for padding.
  void store_queries(const head& p, idx_t b, idx_t kv, idx_t of_group, int) const {
    const idx_t h = kv * shape().group() + of_group;
    const idx_t blind = o().causal ? std::clamp<idx_t>(queries(b) - keys(b), 0, queries(b)) : 0;
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

  /// Packs the means of the clusters.
  void pack_far(const head& p, idx_t b, idx_t, idx_t, int) const {
    const idx_t rows = o().segments(keys(b)) * o().clusters;
    const auto& sums = p.clusters.sums;
    backward_keys<T> distant = p.far_back;
    if (rows > 0)
      distant.fill(matrix_view<const T>{clustering.mean(p, 0), rows, shape().dim, sums.stride, 1},
               matrix_view<const T>{clustering.value_mean(p, 0), rows, shape().dim_v, sums.stride_v, 1}, 0, rows);
  }

  void run_wave(const wave<head>& w) const {
    using self = multipole_backward_driver;
    const auto each = [&](idx_t steps, auto step) { for_each_head(w, shape().kv_heads, steps, *this, step); };
    clustering.run(w);
    if (with_far()) each(1, &self::pack_far);
    each(sides * parts(), &self::part_back);
    each(ceil_div(shape().keys, key_step), &self::store_keys);
    each(in.dq ? shape().group() : 0, &self::store_queries);
  }

  void run() {
    if (!in.dq && !in.dk && !in.dv) return;
    const idx_t item_heads = shape().batch * shape().kv_heads;
    if (in.dq && in.dk && in.dv)
      sides = std::clamp<idx_t>(in.forward.exec.active_threads() / std::max<idx_t>(1, item_heads * parts()), 1, 3);
    for (const auto& w : waves_of(in.forward.exec, item_heads, [&](arena& memory) { return layout(memory); }))
      run_wave(w);
  }
};

template <class S>
void run_multipole_backward(softmax_backward_call<S, no_score, no_score_backward>& call,
                            const multipole_clustering<S>& clustering) {
  const standard_products standard(call.forward.exec);  // multipole always uses these
  softmax_backward_work work(call, 2.7 * clustering.operations());
  if (work.needs_lse()) {
    multipole_clustering<S> forward = clustering;
    forward.v = call.forward.v, forward.shape = call.forward.shape;
    run_multipole(call.forward, forward);
  }
  multipole_backward_driver<S>{.in = call, .clustering = clustering}.run();
  work.store_parameters();
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN(S) void run_multipole_backward(softmax_backward_call<S, no_score, no_score_backward>&,                \
  const multipole_clustering<S>&)
#include <attn/core/detail/compiled.hpp>
