// attn: the driver of nystrom_backward: the forward call up to A^+ softmax(scale Q' K^T) V, then the backward passes of
// the queries, of the inverse, of the keys, and of the landmarks.
#pragma once

#include <attn/low_rank/detail/convolution_backward.hpp>
#include <attn/low_rank/detail/nystrom_run.hpp>
#include <attn/low_rank/detail/nystrom_query_head.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// A checked call. Gradients that are not wanted are null.
template <class S>
struct nystrom_backward_call {
  nystrom_driver<S> forward;
  tensor_view<const S> d_out;
  tensor_view<S> dq, dk, dv;
  tensor_view<compute_type<S>, 2> d_convolution;
  bool accumulate;
};

template <class S>
struct nystrom_backward_driver : nystrom_backward_call<S> {
  using base = nystrom_backward_call<S>;
  using base::accumulate, base::d_convolution, base::d_out, base::dk, base::dq, base::dv, base::forward;
  using T = compute_type<S>;
  using head = nystrom_backward_head<product_type<S>>;
  using query_data = nystrom_query_head<T>;

  execution& exec = forward.exec;
  landmark_inverse<T> kind = forward.inverse;
  T* inner = nullptr;  // [batch * heads]: gradients by the start of the iteration, which the whole batch shares
  idx_t highest = -1;  // the head, of all items, with its largest column
  idx_t last = -1;     // the key head with that head, which comes last
  bool at_last = false;

  const landmark_plan& plan() const { return forward.plan; }
  const attention_shape& shape() const { return forward.plan.shape; }
  const sequence_lengths& lengths() const { return forward.plan.lengths; }
  bool scores() const { return dq || dk; }
  idx_t m() const { return forward.m(); }
  idx_t stride() const { return sums_stride<T>(shape().dim); }
  idx_t stride_v() const { return sums_stride<T>(shape().dim_v); }
  idx_t query_parts() const { return parts_of(shape().queries, 16, 512); }
  T factor() const { return forward.terms.query_factor(); }
  T* query_sums_of(const head& p, idx_t g) const { return dq ? p.d_queries + g * shape().queries * stride() : nullptr; }
  T* landmark_gradients(const head& p, idx_t g) const {
    return p.d_w + g * (std::min)(m(), (std::max)(shape().queries, shape().keys)) * stride_v();
  }
  /// Whether the result is what the landmarks of the queries attend to.
  bool queries_are_landmarks(idx_t b) const { return plan().few_queries(b) && !plan().few_keys(b); }
  convolution_backward<S> convolution() const {
    return {forward.convolution, forward.views.v, d_out, shape(), lengths(), plan().seen};
  }
  few_rows_scratch<T> block_scratch(arena& memory) const {
    return few_rows_scratch<T>::layout(memory, (std::min)(m(), (std::max)(shape().queries, shape().keys)), shape().dim,
                                       shape().dim_v);
  }

  // The steps of a wave, in order: step(head, batch item, its key head, number of the step, worker).

  void average(const head& p, idx_t b, idx_t kv, idx_t step, int worker) const {
    forward.average(p.forward, b, kv, step, worker);
  }
  void attend_part(const head& p, idx_t b, idx_t kv, idx_t n, int worker) const {
    forward.attend_part(p.forward, b, kv, n, worker);
  }
  /// Packs what queries attend to: K' or all keys; then the values of every query head.
  void pack_keys(head& p, idx_t b, idx_t kv, idx_t, int) const {
    forward.merge_parts(p.forward, b, kv, 0, 0);
    const landmark_list& seen = *p.forward.seen;
    if (plan().few_keys(b))
      p.keys.pack(head_of(forward.views.k, b, kv), seen.count, factor(), seen.map());
    else if (!plan().few_queries(b))
      p.keys.pack(matrix_view<const T>{p.forward.keys, m(), shape().dim, shape().dim, 1}, seen.count, factor());
  }
  void prepare(const head& p, idx_t b, idx_t kv, idx_t g, int worker) const {
    query_data& one = p.query_heads[g];
    const landmark_list& seen = *p.forward.seen;
    if (plan().few_keys(b))
      return one.values.pack(head_of(forward.views.v, b, kv), seen.count, T(1), seen.map());
    const online_softmax<T>& w = p.forward.partial[0];
    if (!plan().few_queries(b))
      return one.invert(p.forward.queries + g * m() * shape().dim, p.forward.keys, seen.count, w, g * m(),
                        forward.terms, kind, exec, worker);
    const idx_t h = kv * shape().group() + g, queries = lengths().queries(b);
    T* const d = landmark_gradients(p, g);
    for (idx_t r = 0; r < queries; ++r) {
      const T normal = T(1) / w.sum[g * queries + r];
      for (idx_t c = 0; c < shape().dim_v; ++c) {
        w.row(g * queries + r)[c] *= normal;
        d[r * stride_v() + c] = static_cast<T>(d_out(b, h, r, c));
      }
    }
    one.pack_landmarks(head_of(forward.views.q, b, h), queries, w, g * queries, d, stride_v(), factor());
  }

  /// The queries of one part.
  void queries_back(const head& p, idx_t b, idx_t kv, idx_t step, int worker) const {
    const idx_t g = step / query_parts(), part = step % query_parts(), h = kv * shape().group() + g;
    if (queries_are_landmarks(b)) return;
    const query_data& one = p.query_heads[g];
    const idx_t queries = lengths().queries(b), end = segment_begin(part + 1, queries, query_parts());
    one.d_values.clear(part), one.d_keys.clear(part);
    if (p.keys.count == 0) return;
    auto s = exec.scratch(worker, [&](arena& memory) { return block_scratch(memory); });
    const bool values = !plan().few_keys(b) || dv;
    for (idx_t at = segment_begin(part, queries, query_parts()); at < end; at += few_rows_block)
      backward_of_queries<T>(head_of(forward.views.q, b, h), head_of(d_out, b, h), at,
                             (std::min)(few_rows_block, end - at), p.keys, one.values, nullptr, s,
                             {.queries = dq ? query_sums_of(p, g) + at * stride() : nullptr,
                              .keys = dk ? one.d_keys.part(part) : nullptr,
                              .values = values ? one.d_values.part(part) : nullptr, .stride = stride(),
                              .stride_v = stride_v()});
  }

  /// Adds up the parts, then the backward pass of the inverse.
  void inverse_back(const head& p, idx_t b, idx_t kv, idx_t g, int worker) const {
    const idx_t h = kv * shape().group() + g;
    query_data& one = p.query_heads[g];
    one.d_queries.clear(0);
    if (queries_are_landmarks(b)) return;
    one.d_values.merge(T(1)), one.d_keys.merge(T(1));
    if (plan().few_keys(b)) return;
    T* const d_w = landmark_gradients(p, g);
    const online_softmax<T>& w = p.forward.partial[0];
    const T of_start = one.invert_back(w, g * m(), kind, scores(), d_w, stride_v(), exec, worker);
    if (inner)
      inner[b * shape().heads + h] = of_start;
    else if (scores() && !kind.exact)
      one.add_to_largest_column(-of_start / one.norms.column);
    one.pack_landmarks(
        matrix_view<const T>{p.forward.queries + g * m() * shape().dim, m(), shape().dim, shape().dim, 1}, m(), w,
        g * m(), d_w, stride_v(), factor());
  }
  void weights_back(const head& p, idx_t b, idx_t kv, idx_t g, int worker) const {
    if (plan().few_keys(b) || plan().few_queries(b) || !scores()) return;
    query_data& one = p.query_heads[g];
    if (inner && b * shape().heads + kv * shape().group() + g == highest) {
      T of_start = T(0);
      for (idx_t n = 0; n < shape().batch * shape().heads; ++n) of_start += inner[n];
      one.add_to_largest_column(-of_start / one.norms.column);
    }
    one.add_through_weights(p.keys, exec, worker);
  }

  /// The gradients of K', of all heads of a group; where they are all keys, those of keys and values.
  void landmark_keys_back(const head& p, idx_t b, idx_t kv, idx_t, int) const {
    const idx_t keys = lengths().keys(b), rows = p.keys.count, group = shape().group();
    const bool few = plan().few_keys(b), tokens = few && lengths().queries(b) > 0;
    if (!plan().few_queries(b) || few)
      for (idx_t x = 0; dk && x < rows * stride(); ++x) {
        T sum = T(0);
        for (idx_t g = 0; g < group; ++g) sum += p.query_heads[g].d_keys.data[x];
        p.d_keys[x] = sum * forward.terms.scale;
      }
    if (dk && (few || !plan().few_queries(b))) p.forward.seen->scatter(p.d_keys, stride(), few ? keys : m());
    for (idx_t g = 1; few && g < group; ++g)
      for (idx_t x = 0; x < rows * stride_v(); ++x)
        p.query_heads[0].d_values.data[x] += p.query_heads[g].d_values.data[x];
    if (few) p.forward.seen->scatter(p.query_heads[0].d_values.data, stride_v(), keys);
    for (idx_t g = 0; few && dv && forward.convolution && g < group; ++g)
      for (idx_t n = 0; n < rows; ++n) {
        const idx_t j = p.forward.seen->map()[n];
        convolution().add_value(b, kv * group + g, j, p.query_heads[0].d_values.row(j));
      }
    const idx_t begin = few ? 0 : keys;
    if (dk)
      store_gradient_rows(p.d_keys, stride(), T(1), head_of(dk, b, kv), begin, shape().keys, tokens ? keys : 0,
                          accumulate);
    if (dv)
      store_gradient_rows(p.query_heads[0].d_values.data, stride_v(), T(1), head_of(dv, b, kv), begin, shape().keys,
                          tokens ? keys : 0, accumulate);
  }

  /// The keys and values of one part.
  void keys_back(const head& p, idx_t b, idx_t kv, idx_t part, int worker) const {
    if (plan().few_keys(b)) return;
    const idx_t keys = lengths().keys(b), group = shape().group();
    const idx_t begin = segment_begin(plan().part_begin(part), keys, m());
    const idx_t end = segment_begin(plan().part_begin(part + 1), keys, m());
    struct {
      few_rows_scratch<T> s;
      T *keys, *values;
    } block;
    block = exec.scratch(worker, [&](arena& memory) {
      return decltype(block){block_scratch(memory), memory.allocate<T>(few_rows_block * stride()),
                             memory.allocate<T>(few_rows_block * stride_v())};
    });
    for (idx_t g = 0; g < group; ++g) p.query_heads[g].d_queries.clear(part + 1);
    for (idx_t at = begin; at < end; at += few_rows_block) {
      const idx_t count = (std::min)(few_rows_block, end - at);
      block.s.x.pack(head_of(forward.views.k, b, kv), at, count, true, bool(dq));
      const seen_range seen = plan().seen.range(b, at, at + count);
      if (dq) seen.clear_panels(block.s.x.panels, few_rows_block, count, shape().dim);
      block.s.y.pack(head_of(forward.views.v, b, kv), at, count, scores(), false);
      for (idx_t g = 0; g < group; ++g)
        backward_of_keys<T>(p.query_heads[g].landmarks, seen, block.s, dk ? block.keys : nullptr, stride(),
                            dv ? block.values : nullptr, stride_v(),
                            dq ? p.query_heads[g].d_queries.part(part + 1) : nullptr, g > 0);
      if (dk) finish_rows(block.keys, at, at + count, plan().few_queries(b) ? nullptr : p.d_keys, keys, plan().seen, b);
      for (idx_t g = 0; dv && forward.convolution && g < group; ++g)
        for (idx_t j = 0; j < count; ++j)
          convolution().add_value(b, kv * group + g, at + j, block.values + j * stride_v());
      seen.clear_rows(block.keys, count, stride()), seen.clear_rows(block.values, count, stride_v());
      if (dk)
        store_gradient_rows(block.keys, stride(), T(1), from_row(head_of(dk, b, kv), at), 0, count, count, accumulate);
      if (dv)
        store_gradient_rows(block.values, stride_v(), T(1), from_row(head_of(dv, b, kv), at), 0, count, count,
                            accumulate);
    }
  }

  /// Multiplies rows of sums of tokens [begin, end) by the scale, and adds their shares of the gradients of their
  /// landmarks, if there are any. Where tokens are the keys of batch item b, landmarks are means of those seen.
  void finish_rows(T* rows, idx_t begin, idx_t end, const T* of_landmarks, idx_t length, const key_flags& seen = {},
                   idx_t b = 0) const {
    const T scale = forward.terms.scale;
    for (idx_t i = begin; i < end && !of_landmarks; ++i, rows += stride())
      for (idx_t d = 0; d < shape().dim; ++d) rows[d] *= scale;
    if (!of_landmarks || begin >= end) return;
    idx_t i = begin;
    for (idx_t a = segment_of(begin, length, m()); i < end; ++a) {
      const idx_t stop = segment_begin(a + 1, length, m());
      const T share = T(1) / static_cast<T>(seen.count(b, segment_begin(a, length, m()), stop));
      const T* const sums = of_landmarks + a * stride();
      for (; i < (std::min)(stop, end); ++i, rows += stride())
        for (idx_t d = 0; d < shape().dim; ++d) rows[d] = rows[d] * scale + sums[d] * share;
    }
  }

  void merge_queries(const head& p, idx_t b, idx_t, idx_t g, int) const {
    if (!plan().few_keys(b)) p.query_heads[g].d_queries.merge(forward.terms.scale);
  }
  /// A block of queries.
  void store_queries(const head& p, idx_t b, idx_t kv, idx_t step, int) const {
    const idx_t blocks = ceil_div(shape().queries, few_rows_block), g = step / blocks, h = kv * shape().group() + g;
    const idx_t begin = step % blocks * few_rows_block, end = (std::min)(begin + few_rows_block, shape().queries);
    const idx_t queries = lengths().queries(b), real = (std::min)(end, queries);
    const query_data& one = p.query_heads[g];
    const matrix_view<S> to = from_row(head_of(dq, b, h), begin);
    if (queries_are_landmarks(b))
      return store_gradient_rows(one.d_queries.row((std::min)(begin, queries)), stride(), T(1), to, 0, end - begin,
                                 std::max<idx_t>(0, real - begin), accumulate);
    T* const sums = query_sums_of(p, g);
    if (p.keys.count == 0) std::fill(sums + begin * stride(), sums + (std::max)(begin, real) * stride(), T(0));
    finish_rows(sums + begin * stride(), begin, real, plan().few_keys(b) ? nullptr : one.d_queries.data, queries);
    store_gradient_rows(sums + begin * stride(), stride(), T(1), to, 0, end - begin, std::max<idx_t>(0, real - begin),
                        accumulate);
  }

  void run_wave(const wave<head>& w) const {
    using self = nystrom_backward_driver;
    const idx_t heads = shape().kv_heads, group = shape().group(), parts = plan().parts();
    const auto each = [&](idx_t steps, auto step) {
      w.for_each(steps, [&](idx_t item, head& p, idx_t number, int worker) {
        const idx_t n = at_last ? last : item + (last >= 0 && item >= last);
        (this->*step)(p, n / heads, n % heads, number, worker);
      });
    };
    each(group * ceil_div(plan().most_queries(), landmark_step), &self::average);
    each(parts, &self::attend_part);
    each(1, &self::pack_keys);
    each(group, &self::prepare);
    each(group * query_parts(), &self::queries_back);
    each(group, &self::inverse_back);
    each(group, &self::weights_back);
    each(1, &self::landmark_keys_back);
    each(parts, &self::keys_back);
    if (!dq) return;
    each(group, &self::merge_queries);
    each(group * ceil_div(shape().queries, few_rows_block), &self::store_queries);
  }

  void run_waves(idx_t item_heads) {
    const auto layout_item = [&](arena& memory) { return head::layout(memory, plan(), query_parts(), kind, bool(dq)); };
    for (const auto& w : waves_of(exec, item_heads, layout_item)) run_wave(w);
  }

  void run() {
    const auto limit = exec.limit_threads({.operations = 3 * forward.operations()});
    if (d_convolution) convolution().store_weights(d_convolution, accumulate, exec);
    if (!scores() && !dv) return;
    const idx_t item_heads = shape().batch * shape().kv_heads;
    if (!forward.whole_batch) return run_waves(item_heads);
    const idx_t heads = shape().batch * shape().heads;
    const auto of_heads = exec.workspace([&](arena& memory) { return memory.allocate<T>(heads); });
    inner = *of_heads;
    std::fill_n(inner, heads, T(0));
    kind.norms.emplace();
    const start_norms<T>* const norms = forward.head_norms();
    for (idx_t n = 0; n < heads; ++n) {
      if (norms[n].column > kind.norms->column) highest = n;
      kind.norms->raise(norms[n]);
    }
    if (highest < 0) return run_waves(item_heads);
    // The key head with the largest column of all comes last, because the gradients of the others' starts go to it.
    last = highest / shape().group();
    run_waves(item_heads - 1);
    at_last = true;
    run_waves(1);
  }
};

template <class S>
void run_nystrom_backward(const nystrom_backward_call<S>& call) {
  nystrom_backward_driver<S>{call}.run();
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN(S) void run_nystrom_backward(const nystrom_backward_call<S>&)
#include <attn/core/detail/compiled.hpp>
