// attn: the driver of linformer_backward: projects keys and values again, then the backward passes of the softmax over
// them and of the projections.
#pragma once

#include <attn/core/detail/gradients.hpp>
#include <attn/low_rank/detail/few_rows_backward.hpp>
#include <attn/low_rank/detail/linformer_run.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Projected keys or values of one head, as operands, and their gradient, as sums.
template <class P>
struct projected_rows {
  using T = sum_type<P>;

  few_rows<P> rows, gradient;
  sums_in_parts<T>* sums = nullptr;  // [query heads that attend to them], by parts of the queries

  static projected_rows layout(arena& memory, idx_t rank, idx_t dim, idx_t query_heads, idx_t parts) {
    return {
        few_rows<P>::layout(memory, rank, dim), few_rows<P>::layout(memory, rank, dim),
        memory.allocate_list(query_heads, [&](arena& m) { return sums_in_parts<T>::layout(m, parts, rank, dim); })};
  }
};

/// One batch item: projected keys and values as project() computes them, and as operands for each of their heads.
template <class P>
struct linformer_backward_item {
  sum_type<P> *keys = nullptr, *values = nullptr;
  projected_rows<P>*key_heads = nullptr, *value_heads = nullptr;
};

/// The gradients of one projection and of the tokens it is applied to; null views: not wanted.
template <class S>
struct projection_gradients {
  using T = compute_type<S>;

  tensor_view<S, 3> e;
  tensor_view<S> x;
  T* sums = nullptr;  // [heads of E][rank][columns]: in e itself where possible, else in scratch memory
  idx_t head_stride = 0, stride = 0;
  bool in_place = false;

  bool any() const { return e || x; }
  /// Not where many heads are summed up: the rows of e may then fall into the same few sets of the cache.
  void layout(arena& memory, bool accumulate) {
    in_place = std::same_as<S, T> && !accumulate && e.stride(2) == 1 && e.extent(0) > 1;
    stride = in_place ? e.stride(1) : round_up(e.extent(2), width<T>) + width<T>;
    head_stride = in_place ? e.stride(0) : e.extent(1) * stride;
    sums = memory.allocate<T>(in_place ? 0 : e.extent(0) * head_stride);
    if constexpr (std::same_as<S, T>)
      if (in_place) sums = e.data();
  }
  T* row(idx_t head, idx_t r) const { return sums + head * head_stride + r * stride; }
  /// Sets the columns from `begin` on to 0.
  void clear(idx_t begin) const {
    for (idx_t head = 0; head < e.extent(0); ++head)
      for (idx_t r = 0; r < e.extent(1); ++r) std::fill(row(head, r) + begin, row(head, r) + e.extent(2), T(0));
  }
};

/// A checked call. Gradients that are not wanted are null.
template <class S>
struct linformer_backward_call {
  linformer_call<S> forward;
  tensor_view<const S> d_out;
  tensor_view<const compute_type<S>, 3> d_lse;
  tensor_view<S> dq, dk, dv;
  tensor_view<S, 3> de, df;
  bool accumulate;
};

template <class S>
struct linformer_backward_driver {
  using T = compute_type<S>;
  using P = product_type<S>;
  using item = linformer_backward_item<P>;

  const linformer_backward_call<S>& in;
  const attention_views<S>& views = in.forward.views;
  const score_terms<T, no_score>& terms = in.forward.terms;
  sequence_projection<S> keys = in.forward.template side<P>(in.forward.e, views.k),
                         values = in.forward.template side<P>(in.forward.f, views.v);
  projection_gradients<S> key_gradients{.e = in.de, .x = in.dk}, value_gradients{.e = in.df, .x = in.dv};
  bool shared = in.forward.shared(), accumulate = in.accumulate;

  const attention_shape& shape() const { return views.shape; }
  idx_t rank() const { return keys.rank(); }
  idx_t parts() const { return parts_of(shape().queries, 16, 1024); }
  /// The head of the projected tokens that query head h sees, and the number of h among the query heads that see it.
  idx_t result_head(const sequence_projection<S>& side, idx_t h) const { return h * side.heads / shape().heads; }
  idx_t place(const sequence_projection<S>& side, idx_t h) const { return h % (shape().heads / side.heads); }

  item layout(arena& memory) const {
    const auto heads = [&](const sequence_projection<S>& side) {
      return memory.allocate_list(side.heads, [&](arena& m) {
        return projected_rows<P>::layout(m, rank(), side.x.extent(3), shape().heads / side.heads, parts());
      });
    };
    item one;
    one.keys = memory.allocate<T>(keys.memory_size());
    one.values = memory.allocate<T>(values.memory_size());
    one.key_heads = heads(keys);
    one.value_heads = heads(values);
    return one;
  }

  /// The queries of one part.
  void queries_back(const item& one, idx_t b, idx_t h, idx_t part, execution& exec, int worker) const {
    const projected_rows<P>&to_keys = one.key_heads[result_head(keys, h)],
          &to_values = one.value_heads[result_head(values, h)];
    const sums_in_parts<T>&d_keys = to_keys.sums[place(keys, h)], &d_values = to_values.sums[place(values, h)];
    const idx_t queries = views.lengths.queries(b), stride = sums_stride<T>(shape().dim);
    struct {
      few_rows_scratch<P> s;
      T *d_lse, *dq;
    } block;
    block = exec.scratch(worker, [&](arena& memory) {
      return decltype(block){few_rows_scratch<P>::layout(memory, rank(), shape().dim, shape().dim_v),
                             memory.allocate<T>(few_rows_block), memory.allocate<T>(few_rows_block * stride)};
    });
    if (key_gradients.any()) d_keys.clear(part);
    if (value_gradients.any()) d_values.clear(part);
    if (in.d_lse) std::fill_n(block.d_lse, few_rows_block, T(0));
    const idx_t end = segment_begin(part + 1, queries, parts());
    for (idx_t at = segment_begin(part, queries, parts()); at < end; at += few_rows_block) {
      const idx_t count = (std::min)(few_rows_block, end - at);
      for (idx_t i = 0; in.d_lse && i < count; ++i) block.d_lse[i] = in.d_lse(b, h, at + i);
      backward_of_queries<P>(head_of(views.q, b, h), head_of(in.d_out, b, h), at, count, to_keys.rows, to_values.rows,
                             in.d_lse ? block.d_lse : nullptr, block.s,
                             {.queries = in.dq ? block.dq : nullptr,
                              .keys = key_gradients.any() ? d_keys.part(part) : nullptr,
                              .values = value_gradients.any() ? d_values.part(part) : nullptr, .stride = stride,
                              .stride_v = sums_stride<T>(shape().dim_v)});
      if (in.dq)
        store_gradient_rows(block.dq, stride, terms.scale, from_row(head_of(in.dq, b, h), at), 0, count, count,
                            accumulate);
    }
  }

  /// The gradient of one head of projected rows, summed over all query heads that see it, as an operand.
  void merge(const projected_rows<P>& to, idx_t query_heads, T factor) const {
    const sums_in_parts<T>& all = to.sums[0];
    all.merge(T(1));
    for (idx_t g = 1; g < query_heads; ++g) {
      to.sums[g].merge(T(1));
      for (idx_t x = 0; x < all.rows * all.stride; ++x) all.data[x] += to.sums[g].data[x];
    }
    few_rows<P> operand = to.gradient;
    for (idx_t x = 0; x < all.rows * all.stride; ++x) all.data[x] *= factor;
    operand.pack(matrix_view<const T>{all.data, rank(), operand.dim, all.stride, 1}, rank(), T(1));
  }

  /// Tokens [begin, end) of one side: of a wave of items, one after the other.
  void tokens_back(const wave<item>& w, bool second, idx_t begin, idx_t end, int worker) const {
    const sequence_projection<S>& side = second ? values : keys;
    const projection_gradients<S>& to = second ? value_gradients : key_gradients;
    const idx_t dim = side.x.extent(3), stride = sums_stride<T>(dim), one_e = side.e.extent(0) == 1;
    struct {
      block_tokens<P> x;
      T *e, *dx, *edge;
      P* operands;
    } block;
    block = w.exec.scratch(worker, [&](arena& memory) {
      return decltype(block){block_tokens<P>::layout(memory, dim), memory.allocate<T>(rank() * few_rows_stride),
                             memory.allocate<T>(few_rows_block * stride),
                             memory.allocate<T>(round_up(rank(), tile_rows) * few_rows_stride),
                             operand_weights<P>(memory, rank())};
    });
    if (to.x && one_e) load_projection(side, 0, begin, end - begin, block.e);
    const idx_t group = side.heads / shape().kv_heads;  // heads of the result for each head of x
    for (idx_t n = 0; n < w.count; ++n)
      for (idx_t kv = 0; kv < shape().kv_heads; ++kv) {
        const idx_t b = w.first + n, real = (std::min)(end, views.lengths.keys(b)), count = real - begin;
        const seen_range seen = side.seen.range(b, begin, real);
        const projected_rows<P>* const heads =
            (second ? w.scratch[n].value_heads : w.scratch[n].key_heads) + kv * group;
        if (count > 0 && to.e) block.x.pack(head_of(side.x, b, kv), begin, count, true, false);
        for (idx_t g = 0; g < group && count > 0; ++g) {
          const few_rows<P> gradient = gradient_of(heads[g]);
          if (to.e)
            add_to_projection(gradient, block.x, seen, to, one_e ? 0 : kv * group + g, begin,
                              b > 0 || (one_e && kv > 0), block.edge);
          if (!to.x) continue;
          if (!one_e) load_projection(side, kv * group + g, begin, count, block.e);
          gradient.weighted_sums(block.e, count, block.dx, stride, g > 0, block.operands);
        }
        if (to.x) seen.clear_rows(block.dx, count, stride);
        if (to.x)
          store_gradient_rows(block.dx, stride, T(1), from_row(head_of(to.x, b, kv), begin), 0, end - begin,
                              std::max<idx_t>(count, 0), accumulate);
      }
  }
  few_rows<P> gradient_of(const projected_rows<P>& x) const {
    few_rows<P> gradient = x.gradient;
    gradient.count = rank();
    return gradient;
  }
  /// Products of rows and tokens become columns [begin, ...) of the sums of one head of E, or are added to them.
  static void add_to_projection(const few_rows<P>& rows, const block_tokens<P>& x, const seen_range& seen,
                                const projection_gradients<S>& to, idx_t head, idx_t begin, bool add, T* edge) {
    const idx_t whole = seen ? 0 : x.count / panel_width<T> * panel_width<T>, rest = x.count - whole;
    T* const sums = to.row(head, 0) + begin;
    if (whole > 0) rows.scores(x.columns, whole, sums, to.stride, add);
    if (rest == 0) return;
    // Products of the last, partial packets are not all those of tokens, nor are all tokens seen.
    rows.scores(x.columns + whole * operands<P>(rows.dim), rest, edge);
    for (idx_t r = 0; r < rows.count; ++r)
      for (idx_t j = 0; j < rest; ++j) {
        T& to_one = sums[r * to.stride + whole + j];
        to_one = (add ? to_one : T(0)) + (seen.hides(j) ? T(0) : edge[r * few_rows_stride + j]);
      }
  }
  /// Columns [begin, begin + count) of one head of E, as [rank][few_rows_stride].
  void load_projection(const sequence_projection<S>& side, idx_t head, idx_t begin, idx_t count, T* to) const {
    for (idx_t r = 0; r < rank(); ++r)
      for (idx_t j = 0; j < count; j += width<T>)
        store<T>(to + r * few_rows_stride + j, load_part<T>(&side.e(head, r, begin + j), side.e.stride(2), count - j));
  }

  void run_wave(const wave<item>& w) const {
    project(keys, values, shared, views.lengths, w);
    const idx_t heads = shape().heads, token_blocks = ceil_div(shape().keys, few_rows_block);
    w.for_each(keys.heads + values.heads, [&](idx_t, const item& one, idx_t h, int) {
      if (h < keys.heads)
        one.key_heads[h].rows.pack(const_rows(keys.result(one.keys, h)), rank(), terms.query_factor());
      else
        one.value_heads[h - keys.heads].rows.pack(const_rows(values.result(one.values, h - keys.heads)), rank(), T(1));
    });
    w.exec.for_each(w.count * heads * parts(), [&](idx_t task, int worker) {
      const idx_t n = task / parts() / heads, h = task / parts() % heads, b = w.first + n;
      if (views.lengths.keys(b) > 0) return queries_back(w.scratch[n], b, h, task % parts(), w.exec, worker);
    });
    w.exec.for_each(in.dq ? w.count * heads : 0, [&](idx_t task, int) {
      const idx_t b = w.first + task / heads, real = views.lengths.keys(b) > 0 ? views.lengths.queries(b) : 0;
      store_gradient_rows<T>(nullptr, 0, T(0), head_of(in.dq, b, task % heads), real, shape().queries, 0, accumulate);
    });
    w.for_each(keys.heads + values.heads, [&](idx_t b, const item& one, idx_t h, int) {
      if (views.lengths.keys(b) == 0) return;
      if (h < keys.heads && key_gradients.any())
        merge(one.key_heads[h], heads / keys.heads, terms.scale);
      else if (h >= keys.heads && value_gradients.any())
        merge(one.value_heads[h - keys.heads], heads / values.heads, T(1));
    });
    w.exec.for_each(2 * token_blocks, [&](idx_t task, int worker) {
      const bool second = task >= token_blocks;
      if (!(second ? value_gradients : key_gradients).any()) return;
      const idx_t begin = task % token_blocks * few_rows_block;
      tokens_back(w, second, begin, (std::min)(begin + few_rows_block, shape().keys), worker);
    });
  }
  static matrix_view<const T> const_rows(const matrix_view<T>& x) {
    return {x.data, x.rows, x.cols, x.row_stride, x.col_stride};
  }

  void store_projection(const projection_gradients<S>& from, execution& exec) const {
    exec.for_each(from.in_place ? 0 : from.e.extent(0) * rank(), [&](idx_t task, int) {
      const idx_t head = task / rank(), r = task % rank();
      for (idx_t j = 0; j < from.e.extent(2); ++j) store_gradient(from.e(head, r, j), from.row(head, r)[j], accumulate);
    });
  }

  void run(execution& exec) {
    if (!in.dq && !key_gradients.any() && !value_gradients.any()) return;
    const double scores = static_cast<double>(rank()) * static_cast<double>(shape().queries + shape().keys);
    const auto limit = exec.limit_threads({.operations = 2.75 * scores * shape().operations_per_score()});
    const auto memory = exec.workspace([&](arena& m) {
      auto* const first = m.allocate<product_type<S>>(keys.packed_size());
      const std::array packed{first, shared ? first : m.allocate<product_type<S>>(values.packed_size())};
      key_gradients.layout(m, accumulate);
      value_gradients.layout(m, accumulate);
      return packed;
    });
    keys.packed = (*memory)[0], values.packed = (*memory)[1];
    // The first batch item overwrites its columns.
    for (const projection_gradients<S>* x : {&key_gradients, &value_gradients})
      x->clear(shape().batch > 0 ? views.lengths.keys(0) : 0);
    // As in the forward pass, 32 heads share the packing of E and F.
    const auto layout_item = [&](arena& m) { return layout(m); };
    for (const auto& w : waves_of(exec, shape().batch, std::max<idx_t>(1, 32 / shape().heads), layout_item))
      run_wave(w);
    store_projection(key_gradients, exec);
    store_projection(value_gradients, exec);
  }
};

template <class S>
void run_linformer_backward(const linformer_backward_call<S>& call, execution& exec) {
  if (call.forward.views.shape.heads == 0) {
    if (!call.accumulate)
      for (const tensor_view<S, 3>& x : {call.de, call.df})
        clear_gradient(tensor_view<S>(x.data(), {1, x.extent(0), x.extent(1), x.extent(2)},
                                      {0, x.stride(0), x.stride(1), x.stride(2)}));
    return;
  }
  linformer_backward_driver<S>{call}.run(exec);
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN(S) void run_linformer_backward(const linformer_backward_call<S>&, execution&)
#include <attn/core/detail/compiled.hpp>
