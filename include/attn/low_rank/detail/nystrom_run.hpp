// attn: the driver of nystrom: landmarks, parts of the keys, the inverse, then the queries.
#pragma once

#include <attn/low_rank/detail/landmark_weights.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// A checked call.
template <class S>
struct nystrom_call {
  using T = compute_type<S>;

  const attention_views<S>& views;
  tensor_view<const T, 2> convolution;
  landmark_plan plan;
  score_terms<T, no_score> terms;
  landmark_inverse<T> inverse;
  bool whole_batch;  // the iteration starts from the norms of all heads of all batch items
  execution& exec;
};

template <class S, class P = product_type<S>>
struct nystrom_driver : nystrom_call<S> {
  using base = nystrom_call<S>;
  using base::convolution, base::exec, base::inverse, base::plan, base::terms, base::views, base::whole_batch;
  using T = compute_type<S>;
  using head = landmark_head<P>;
  static constexpr idx_t key_step = key_block;  // keys packed at a time

  idx_t m() const { return plan.landmarks; }
  const attention_shape& shape() const { return plan.shape; }
  /// Whether every query or every key is a landmark: nothing is inverted then.
  bool few_tokens(idx_t b) const { return plan.few_keys(b) || plan.few_queries(b); }

  /// Landmarks [first, last) of the queries or keys of one head.
  void average_queries(T* queries, idx_t b, idx_t kv, idx_t in_group, idx_t first, idx_t last) const {
    const idx_t count = plan.query_landmarks(b);
    segment_means(head_of(views.q, b, kv * shape().group() + in_group), plan.lengths.queries(b), count, first,
                  (std::min)(last, count), queries + in_group * count * shape().dim);
  }
  void average_keys(T* keys, idx_t b, idx_t kv, idx_t first, idx_t last) const {
    segment_means(head_of(views.k, b, kv), plan.lengths.keys(b), m(), first, last, keys, plan.seen, b);
  }

  // The steps of a wave, in order: step(head, batch item, its key head, number of the step, worker).

  /// Some landmarks of the queries.
  void average(const head& p, idx_t b, idx_t kv, idx_t step, int) const {
    const idx_t group = shape().group(), first = step / group * landmark_step;
    if (!plan.few_keys(b)) average_queries(p.queries, b, kv, step % group, first, first + landmark_step);
  }
  /// softmax(Q' K^T) V over one part of the keys, and the landmarks of these keys in the same pass.
  void attend_part(const head& p, idx_t b, idx_t kv, idx_t n, int worker) const {
    if (plan.few_keys(b)) return;
    const idx_t rows = shape().group() * plan.query_landmarks(b), keys = plan.lengths.keys(b);
    const idx_t last = plan.part_begin(n + 1), end = segment_begin(last, keys, m());
    const matrix_view<const S> key = head_of(views.k, b, kv), value = head_of(views.v, b, kv);
    idx_t landmark = plan.part_begin(n);
    online_softmax<T>& to = p.partial[n];
    to.rows = rows;
    to.clear();
    packed_keys<P> packed;
    const idx_t blocks = ceil_div(rows, max_rows);  // of the landmarks of all query heads
    row_block<P>* const queries = exec.scratch(worker, [&](arena& memory) {
      packed = packed_keys<P>::layout(memory, (std::min)(key_step, shape().keys), shape().dim, shape().dim_v);
      return memory.allocate_list(
          blocks, [&](arena& m) { return row_block<P>::layout(m, shape().dim, shape().dim_v); });
    });
    auto masked = terms;  // that of a block with hidden keys
    masked.mask = plan.seen.mask, masked.batch = b;
    for (idx_t i = 0; i < blocks; ++i)
      queries[i].begin(matrix_view<const T>{p.queries, rows, shape().dim, shape().dim, 1}, {i * max_rows, 1, nullptr},
                       (std::min)(max_rows, rows - i * max_rows), terms.query_factor());
    for (idx_t at = segment_begin(landmark, keys, m()); at < end; at += key_step) {
      const idx_t count = (std::min)(key_step, end - at);
      // Reads the rows just before they are packed, so that memory is read once for both.
      for (; landmark < last && segment_begin(landmark, keys, m()) < at + count; ++landmark)
        if (!plan.few_queries(b)) average_keys(p.keys, b, kv, landmark, landmark + 1);
      packed.positions = {at, 1, nullptr};
      packed.pack(key, value, 0, count);
      line_prefetcher next;
      next.add(key, at + count, (std::min)(at + count + key_step, end));
      next.add(value, at + count, (std::min)(at + count + key_step, end));
      packed.next = &next;
      const bool hides = bool(plan.seen.range(b, at, at + count));
      for (idx_t i = 0; i < blocks; ++i) {
        std::fill_n(queries[i].ranges, queries[i].rows, key_range{0, count});
        attend(queries[i], packed, hides ? masked : terms);
      }
    }
    for (idx_t i = 0; i < blocks; ++i)
      for (idx_t r = 0; r < queries[i].rows; ++r) to.copy_row(i * max_rows + r, queries[i].state, r);
  }

  /// Merges the parts of one head, and moves the landmarks that are seen together.
  void merge_parts(const head& p, idx_t b, idx_t, idx_t, int) const {
    plan.list_seen(b, *p.seen);
    if (plan.few_keys(b)) return;
    for (idx_t n = 1; n < plan.parts(); ++n) p.partial[0].merge(p.partial[n]);
    if (!plan.few_queries(b)) p.seen->gather(p.keys, shape().dim);
  }

  /// Adds `weight` times the convolved values of query i to o; those of `seen` keys.
  void add_convolution(const seen_range& seen, idx_t b, idx_t h, idx_t i, T weight, T* o) const {
    const matrix_view<const S> values = head_of(views.v, b, h / shape().group());
    const idx_t taps = convolution.extent(1), position = i + plan.lengths.keys(b) - plan.lengths.queries(b);
    const idx_t first = position - taps / 2;
    const idx_t begin = std::max<idx_t>(0, -first), end = (std::min)(taps, plan.lengths.keys(b) - first);
    for (idx_t d = 0; d < shape().dim_v; d += width<T>) {
      packet<T> sum = zero<T>();
      const auto add_taps = [&](idx_t from, idx_t to) {
        for (idx_t t = from; t < to; ++t)
          sum = fma(broadcast<T>(convolution(h, t)),
                    load_part<T>(values.row(first + t) + d * values.col_stride, values.col_stride, shape().dim_v - d),
                    sum);
      };
      if (!seen) add_taps(begin, end);
      for (idx_t t = begin; seen && t < end; ++t)
        if (!seen.hides(first + t)) add_taps(t, t + 1);
      store<T>(o + d, fma(broadcast<T>(weight), sum, load<T>(o + d)));
    }
  }

  void pack_keys(const head& p, idx_t b, idx_t kv, idx_t in_group, int worker) const {
    if (plan.few_keys(b) && in_group == 0) {
      p.packed[0].positions = p.seen->map();
      p.packed[0].pack(head_of(views.k, b, kv), head_of(views.v, b, kv), 0, p.seen->count);
    } else if (!few_tokens(b)) {
      inverse.pack(p, in_group, m(), terms, exec, worker);
    }
  }
  /// max_rows queries.
  void attend_rows(const head& p, idx_t b, idx_t kv, idx_t step, int worker) const {
    const idx_t row_blocks = ceil_div(shape().queries, max_rows), in_group = step / row_blocks;
    const idx_t h = kv * shape().group() + in_group, i0 = step % row_blocks * max_rows;
    const idx_t queries = plan.lengths.queries(b), i1 = (std::min)(i0 + max_rows, queries);
    const bool few_keys = plan.few_keys(b);
    if (few_keys || !plan.few_queries(b)) {
      const auto& packed = p.packed[few_keys ? 0 : in_group];
      return detail::attend_rows(views, b, h, i0, packed, p.seen->count, terms, {}, exec, worker,
                                 [&](const auto& block) {
                                   for (idx_t r = 0; r < block.rows && convolution; ++r)
                                     add_convolution(p.seen->keys, b, h, i0 + r, block.state.row_sum(r),
                                                     block.state.row(r));
                                 });
    }
    const matrix_view<S> to = head_of(views.out, b, h);
    const online_softmax<T>& known = p.partial[0];
    for (idx_t i = i0; i < i1; ++i) {
      const idx_t r = in_group * queries + i;
      if (convolution) add_convolution(p.seen->keys, b, h, i, known.sum[r], known.row(r));
      known.finish_row(r, nullptr, to.row(i), to.col_stride, nullptr);
    }
    clear_padding(views, b, h, i0, i0 + max_rows, {});
  }

  /// The norms of all heads of all items, in shared scratch memory; those of a head that inverts nothing are 0.
  start_norms<T>* head_norms() const {
    const idx_t item_heads = shape().batch * shape().kv_heads, group = shape().group();
    start_norms<T>* const norms =
        exec.shared_scratch([&](arena& memory) { return memory.allocate<start_norms<T>>(item_heads * group); });
    exec.for_each(item_heads, [&](idx_t n, int worker) {
      const idx_t b = n / shape().kv_heads, kv = n % shape().kv_heads;
      std::fill_n(norms + n * group, group, start_norms<T>{});
      if (few_tokens(b)) return;
      T *queries = nullptr, *keys = nullptr;
      landmark_list seen;
      auto a = exec.scratch(worker, [&](arena& memory) {
        queries = memory.allocate<T>(group * m() * shape().dim);
        keys = memory.allocate<T>(m() * shape().dim);
        seen = plan.list_layout(memory);
        return landmark_weights<T>::layout(memory, m(), shape().dim);
      });
      average_keys(keys, b, kv, 0, m());
      plan.list_seen(b, seen);
      seen.gather(keys, shape().dim);
      for (idx_t in_group = 0; in_group < group; ++in_group) {
        average_queries(queries, b, kv, in_group, 0, m());
        a.compute(queries + in_group * m() * shape().dim, keys, seen.count, terms);
        norms[n * group + in_group] = a.norms();
      }
    });
    return norms;
  }
  /// The largest of them.
  start_norms<T> common_norms() const {
    const start_norms<T>* const norms = head_norms();
    start_norms<T> all;
    for (idx_t n = 0; n < shape().batch * shape().heads; ++n) all.raise(norms[n]);
    return all;
  }

  void run_wave(const wave<head>& w) const {
    using self = nystrom_driver;
    const idx_t group = shape().group();
    const auto each = [&](idx_t steps, auto step) { for_each_head(w, shape().kv_heads, steps, *this, step); };
    each(group * ceil_div(plan.most_queries(), landmark_step), &self::average);
    each(plan.parts(), &self::attend_part);
    each(1, &self::merge_parts);
    each(group, &self::pack_keys);
    each(group * ceil_div(shape().queries, max_rows), &self::attend_rows);
  }

  double operations() const {
    return static_cast<double>((std::min)(plan.landmarks, shape().keys)) *
           static_cast<double>(shape().queries + shape().keys) * shape().operations_per_score();
  }

  void run() {
    const auto limit = exec.limit_threads({.operations = operations()});
    if (whole_batch) inverse.norms = common_norms();
    const auto layout_item = [&](arena& memory) { return head::layout(memory, plan); };
    for (const auto& w : waves_of(exec, shape().batch * shape().kv_heads, layout_item)) run_wave(w);
  }
};

template <class S>
void run_nystrom(const nystrom_call<S>& call) {
  with_products<S>(call.exec, [&]<class P>(std::type_identity<P>) { nystrom_driver<S, P>{call}.run(); });
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN(S) void run_nystrom(const nystrom_call<S>&)
#include <attn/core/detail/compiled.hpp>
