// attn: the driver of nystrom: averages, pieces of the keys, the inverse, then the queries.
#pragma once

#include <attn/core/detail/prefetch.hpp>
#include <attn/core/detail/waves.hpp>
#include <attn/low_rank/detail/landmark_weights.hpp>

namespace attn::inline ATTN_ISA::detail {

/// One call, after its checks.
template <class S>
struct nystrom_call {
  using T = compute_type<S>;
  using pair = landmark_pair<T>;
  static constexpr index key_step = key_block;  // keys packed at a time

  const tensor_view<const S>&q, &k, &v;
  const tensor_view<S>& out;
  tensor_view<const T, 2> convolution;
  landmark_plan plan;
  score_terms<T, no_score> terms;
  landmark_inverse<T> inverse;
  bool whole_batch;  // the iteration starts from the norms of all heads of all batch items

  index m() const { return plan.landmarks; }
  const attention_shape& shape() const { return plan.shape; }

  /// Landmarks [first, last) of the queries of one head.
  void average_queries(T* queries, index b, index kv, index member, index first, index last) const {
    const index count = plan.query_landmarks(b);
    segment_means(head_of(q, b, kv * shape().group() + member), plan.lengths.queries(b), count, first,
                  std::min(last, count), queries + member * count * shape().dim);
  }
  /// Landmarks [first, last) of the keys.
  void average_keys(T* keys, index b, index kv, index first, index last) const {
    segment_means(head_of(k, b, kv), plan.lengths.keys(b), m(), first, last, keys);
  }

  /// softmax(Q' K^T) V over one piece of the keys, and their landmarks on the way.
  void attend_piece(const pair& p, index b, index kv, index n, execution& exec, int worker) const {
    const index rows = shape().group() * plan.query_landmarks(b), keys = plan.lengths.keys(b);
    const index last = plan.piece_begin(n + 1), end = segment_begin(last, keys, m());
    const matrix_view<const S> key = head_of(k, b, kv), value = head_of(v, b, kv);
    index landmark = plan.piece_begin(n);
    online_softmax<T>& to = p.partial[n];
    to.rows = rows;
    to.clear();
    packed_keys<T> packed;
    const auto queries = exec.scratch(worker, [&](arena& memory) {
      packed = packed_keys<T>::layout(memory, std::min(key_step, shape().keys), shape().dim, shape().dim_v);
      return landmark_rows<T>::layout(memory, rows, shape().dim, shape().dim_v);
    });
    queries.begin({p.queries, rows, shape().dim, shape().dim, 1}, terms.query_factor());
    for (index at = segment_begin(landmark, keys, m()); at < end; at += key_step) {
      const index count = std::min(key_step, end - at);
      // Reads the rows just before they are packed: once from memory for both.
      for (; landmark < last && segment_begin(landmark, keys, m()) < at + count; ++landmark)
        if (!plan.few_queries(b)) average_keys(p.keys, b, kv, landmark, landmark + 1);
      packed.positions = {at, 1, nullptr};
      packed.pack(key, value, 0, count);
      // Here and for the queries: 4 % of the whole on one Zen 4 core.
      row_prefetcher<1, cache_level::first>(key, at + count, end).next(key_step);
      row_prefetcher<1, cache_level::first>(value, at + count, end).next(key_step);
      queries.attend(packed, count, terms);
    }
    queries.save(to);
  }

  /// Adds `weight` times the convolved values of query i to o.
  void add_convolution(index b, index h, index i, T weight, T* o) const {
    const matrix_view<const S> values = head_of(v, b, h / shape().group());
    const index taps = convolution.extent(1), position = i + plan.lengths.keys(b) - plan.lengths.queries(b);
    const index first = position - taps / 2;
    const index begin = std::max<index>(0, -first), end = std::min(taps, plan.lengths.keys(b) - first);
    for (index d = 0; d < shape().dim_v; d += width<T>) {
      packet<T> sum = zero<T>();
      for (index t = begin; t < end; ++t)
        sum = fma(broadcast<T>(convolution(h, t)),
                  load_part<T>(values.row(first + t) + d * values.col_stride, values.col_stride, shape().dim_v - d),
                  sum);
      store<T>(o + d, fma(broadcast<T>(weight), sum, load<T>(o + d)));
    }
  }

  /// Queries [i0, i0 + max_rows) of one head.
  void attend_rows(const pair& p, index b, index h, index i0, execution& exec, int worker) const {
    const index queries = plan.lengths.queries(b), i1 = std::min(i0 + max_rows, queries), member = h % shape().group();
    const bool few_keys = plan.few_keys(b);
    const matrix_view<S> to = head_of(out, b, h);
    if (i0 < i1 && plan.few_queries(b) && !few_keys) {
      const online_softmax<T>& known = p.partial[0];
      for (index i = i0; i < i1; ++i) {
        const index r = member * queries + i;
        if (convolution) add_convolution(b, h, i, known.sum[r], known.row(r));
        known.finish_row(r, nullptr, to.row(i), to.col_stride, nullptr);
      }
    } else if (i0 < i1) {
      auto block =
          exec.scratch(worker, [&](arena& memory) { return row_block<T>::layout(memory, shape().dim, shape().dim_v); });
      block.begin(head_of(q, b, h), {i0, 1, nullptr}, i1 - i0, terms.query_factor());
      std::fill_n(block.ranges, block.rows, key_range{0, std::min(m(), plan.lengths.keys(b))});
      row_prefetcher<1, cache_level::first>(head_of(q, b, h), i1, queries).next(max_rows);
      attend(block, p.packed[few_keys ? 0 : member], terms);
      for (index r = 0; r < block.rows && convolution; ++r)
        add_convolution(b, h, i0 + r, block.state.row_sum(r), block.state.row(r));
      finish(block, to, static_cast<const T*>(nullptr), static_cast<T*>(nullptr), 0);
    }
    clear_rows(to, std::max(i0, queries), std::min(i0 + max_rows, shape().queries));
  }

  /// The largest norms of all heads of all items.
  start_norms<T> common_norms(execution& exec) const {
    const index pairs = shape().batch * shape().kv_heads;
    start_norms<T>* const norms =
        exec.shared_scratch([&](arena& memory) { return memory.allocate<start_norms<T>>(pairs); });
    exec.for_each(pairs, [&](index n, int worker) {
      const index b = n / shape().kv_heads, kv = n % shape().kv_heads;
      norms[n] = {};
      if (plan.few_keys(b) || plan.few_queries(b)) return;
      T *queries = nullptr, *keys = nullptr;
      auto a = exec.scratch(worker, [&](arena& memory) {
        queries = memory.allocate<T>(shape().group() * m() * shape().dim);
        keys = memory.allocate<T>(m() * shape().dim);
        return landmark_weights<T>::layout(memory, m(), shape().dim);
      });
      average_keys(keys, b, kv, 0, m());
      for (index member = 0; member < shape().group(); ++member) {
        average_queries(queries, b, kv, member, 0, m());
        a.compute(queries + member * m() * shape().dim, keys, terms);
        norms[n].raise(a.norms());
      }
    });
    start_norms<T> all;
    for (index n = 0; n < pairs; ++n) all.raise(norms[n]);
    return all;
  }

  /// Pairs of batch item and key head.
  void run_wave(const wave<pair>& w) const {
    const index group = shape().group(), kv_heads = shape().kv_heads;
    const auto each = [&](index steps, auto&& body) {  // body(pair, its batch item and key head, step, worker)
      w.for_each(steps, [&](index n, const pair& p, index step, int worker) {
        body(p, n / kv_heads, n % kv_heads, step, worker);
      });
    };
    const index steps = ceil_div(plan.most_queries(), landmark_step), row_blocks = ceil_div(shape().queries, max_rows);
    each(group * steps, [&](const pair& p, index b, index kv, index step, int) {
      const index first = step % steps * landmark_step;
      if (!plan.few_keys(b)) average_queries(p.queries, b, kv, step / steps, first, first + landmark_step);
    });
    each(plan.pieces(), [&](const pair& p, index b, index kv, index n, int worker) {
      if (!plan.few_keys(b)) attend_piece(p, b, kv, n, w.exec, worker);
    });
    each(1, [&](const pair& p, index b, index, index, int) {
      if (!plan.few_keys(b)) p.merge_pieces(plan.pieces());
    });
    each(group, [&](const pair& p, index b, index kv, index member, int worker) {
      if (plan.few_keys(b) && member == 0)
        p.packed[0].pack(head_of(k, b, kv), head_of(v, b, kv), 0, plan.lengths.keys(b));
      else if (!plan.few_keys(b) && !plan.few_queries(b))
        inverse.pack(p, member, m(), terms, w.exec, worker);
    });
    each(group * row_blocks, [&](const pair& p, index b, index kv, index step, int worker) {
      attend_rows(p, b, kv * group + step / row_blocks, step % row_blocks * max_rows, w.exec, worker);
    });
  }

  void run(execution& exec) {
    if (whole_batch) inverse.norms = common_norms(exec);
    const auto layout = [&](arena& memory) { return pair::layout(memory, plan); };
    arena one;
    layout(one);
    const index pairs = shape().batch * shape().kv_heads;
    for_each_wave(exec, pairs, wave_size(exec, pairs, static_cast<index>(one.used())), layout,
                  [&](const wave<pair>& w) { run_wave(w); });
  }
};

}  // namespace attn::inline ATTN_ISA::detail
