// attn: the driver of long_short_backward: keys are compressed again; gradients of queries go to the keys of their
// windows and to the compressed keys, part by part; those of the compressed keys go to tokens and logits.
//
// A part is a range of queries of all heads of a key head, with separate sums for the keys of its windows and for the
// compressed keys; there are at most 8, depending on the shape alone.
#pragma once

#include <attn/low_rank/detail/long_short_key_head.hpp>
#include <attn/softmax/detail/softmax_backward_call.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The gradients of what long_short has beside q, k, v and sinks, where wanted.
template <class S>
struct long_short_parameter_gradients {
  tensor_view<S> logits;
  tensor_view<compute_type<S>, 1> local_gamma, local_beta, global_gamma, global_beta;
};

template <class S>
struct long_short_backward_driver {
  using T = compute_type<S>;
  using P = product_type<S>;
  using head = long_short_key_head<P>;
  using query_data = long_short_query_head<P>;

  const softmax_backward_call<S, no_score, no_score_backward>& in;
  const long_short_driver<S>& forward;
  const long_short_parameter_gradients<S>& wanted;
  T *local_sums = nullptr, *global_sums = nullptr;  // of gamma and beta, [heads][2 dim]: of key heads, of query heads

  bool local_norm() const { return wanted.local_gamma || wanted.local_beta; }
  bool global_norm() const { return wanted.global_gamma || wanted.global_beta; }
  bool compressed_keys() const { return in.dk || wanted.logits || global_norm(); }
  bool compressed_values() const { return in.dv || wanted.logits || global_norm(); }
  bool any() const { return compressed_keys() || in.dv || local_norm(); }
  execution& exec() const { return in.forward.exec; }
  const attention_shape& shape() const { return in.shape; }
  idx_t keys(idx_t b) const { return forward.length(b); }
  idx_t stride() const { return sums_stride<T>(shape().dim); }
  idx_t stride_v() const { return sums_stride<T>(shape().dim_v); }
  idx_t shift(idx_t b) const { return keys(b) - in.lengths().queries(b); }
  idx_t parts() const {
    const idx_t reach = forward.left + forward.right + 2 * forward.block;
    return parts_of(shape().queries, 8, std::max<idx_t>(1024, 4 * reach));
  }
  /// Number of keys that a part may see.
  idx_t part_keys() const {
    return (std::min)(shape().keys,
                    ceil_div(shape().queries, parts()) + forward.left + forward.right + 2 * forward.block);
  }
  idx_t most_rows() const { return forward.finished(shape().keys, shape().keys) * forward.rank(); }
  idx_t compressed_rows(idx_t b) const { return forward.segments(b) * forward.rank(); }
  idx_t key_blocks() const { return ceil_div(shape().keys, part_size); }

  // Scratch -----------------------------------------------------------------------------------------------------------

  query_data query_data_layout(arena& memory) const {
    const idx_t dim = shape().dim, dim_v = shape().dim_v, rows = most_rows();
    query_data m;
    m.sums = token_sums<T>::layout(memory, forward.finished(shape().keys, shape().keys), forward.segment(shape().keys),
                                   forward.rank(), dim, dim_v);
    m.compressed = backward_keys<P>::layout(memory, rows, dim, dim_v, false, false);
    m.normed_keys = memory.allocate<T>(forward.global ? rows * m.sums.padded() : 0);
    m.normed_values = memory.allocate<T>(forward.global ? rows * m.sums.padded_v() : 0);
    m.maximum = memory.allocate<T>(rows), m.share = memory.allocate<T>(rows), m.delta = memory.allocate<T>(rows);
    m.seen = memory.allocate<unsigned char>(forward.key_mask ? rows : 0);
    const idx_t padded = round_up(rows, panel_width<T>);
    m.d_keys = sums_in_parts<T>::layout(memory, parts(), compressed_keys() ? padded : 0, dim);
    m.d_values = sums_in_parts<T>::layout(memory, parts(), compressed_values() ? padded : 0, dim_v);
    return m;
  }
  head layout(arena& memory) const {
    head p;
    p.query_heads = memory.allocate_list(shape().group(), [&](arena& m) { return query_data_layout(m); });
    const idx_t rows = part_keys() + panel_width<T>;
    p.parts = memory.allocate_list(parts(), [&](arena& m) {
      long_short_part<T> part;
      if (in.dk || local_norm()) part.d_keys = m.allocate<T>(rows * stride());
      if (in.dv || local_norm()) part.d_values = m.allocate<T>(rows * stride_v());
      return part;
    });
    if (in.dk || local_norm()) p.d_keys = memory.allocate<T>(shape().keys * stride());
    if (in.dv || local_norm()) p.d_values = memory.allocate<T>(shape().keys * stride_v());
    if (forward.local && (p.d_keys || p.d_values || any()))
      p.local = memory.allocate_list(key_blocks(), [&](arena& m) {
        T* const sums = m.allocate<T>(norm_sums<T>::size(shape().dim));
        return norm_sums<T>{sums, shape().dim};
      });
    return p;
  }
  struct query_scratch {
    backward_scratch<P> block;
    backward_rows<P> rows;
    backward_keys<P> window;
    T *dq, *keys, *values;  // [max_rows][stride]; normed keys of the window
  };
  query_scratch queries_layout(arena& memory) const {
    const idx_t dim = shape().dim, dim_v = shape().dim_v, normed = forward.local ? forward.slot_count() : 0;
    query_scratch s;
    s.block = in.layout_scratch(memory);
    s.rows = backward_rows<P>::layout(memory, max_rows, dim, dim_v);
    s.window = backward_keys<P>::layout(memory, forward.slot_count(), dim, dim_v, false, false);
    s.dq = memory.allocate<T>(max_rows * stride());
    s.keys = memory.allocate<T>(normed * dim), s.values = memory.allocate<T>(normed * dim_v);
    return s;
  }

  // Compressed keys ---------------------------------------------------------------------------------------------------

  // The steps of a wave, in order: step(head, batch item, its key head, number of the step, worker).

  /// A part of the sums of one query head.
  void add_part(const head& p, idx_t b, idx_t kv, idx_t step, int worker) const {
    const idx_t g = step % shape().group(), part = step / shape().group();
    forward.sum_part(p.query_heads[g].sums, head_of(in.v, b, kv), b, kv * shape().group() + g, part, worker);
  }
  /// Merges the sums, and packs them as keys and values.
  void pack_compressed(const head& p, idx_t b, idx_t, idx_t g, int) const {
    query_data& m = p.query_heads[g];
    const idx_t rows = compressed_rows(b), padded = m.sums.padded(), padded_v = m.sums.padded_v();
    for (idx_t n = 0; n < forward.segments(b); ++n) m.sums.merge(n, forward.segment(keys(b)));
    for (idx_t r = 0; r < rows; ++r) {
      const T all = m.sums.total(r, forward.segment(keys(b)), m.maximum[r]);
      m.share[r] = all == T(0) ? T(0) : T(1) / all;
      if (all == T(0)) m.maximum[r] = T(0);
    }
    forward.mark_seen(m.seen, b);
    if (rows == 0) return;
    const T *from_keys = m.sums.all_keys, *from_values = m.sums.all_values;
    if (forward.global) {
      std::copy_n(from_keys, rows * padded, m.normed_keys);
      std::copy_n(from_values, rows * padded_v, m.normed_values);
      for (idx_t r = 0; r < rows; ++r) {
        forward.global.apply(m.normed_keys + r * padded, shape().dim);
        forward.global.apply(m.normed_values + r * padded_v, shape().dim_v);
      }
      from_keys = m.normed_keys, from_values = m.normed_values;
    }
    m.compressed.fill(matrix_view<const T>{from_keys, rows, shape().dim, padded, 1},
                      matrix_view<const T>{from_values, rows, shape().dim_v, padded_v, 1}, 0, rows);
  }

  // Queries -----------------------------------------------------------------------------------------------------------

  /// Queries [begin, end): a chunk of one part.
  void chunk_back(const head& p, idx_t b, idx_t kv, idx_t n, idx_t begin, idx_t end, query_scratch& s) const {
    const idx_t length = keys(b), at = shift(b);
    const idx_t first = forward.window(begin + at, length).begin,
                count = forward.window(end - 1 + at, length).end - first;
    forward.pack_window(head_of(in.k, b, kv), head_of(in.v, b, kv), first, 0, count, s.keys, s.values,
                        s.window.keys.positions, [&](const auto& k, const auto& v) { s.window.fill(k, v, 0, count); });
    const long_short_part<T>& part = p.parts[n];
    s.window.d_keys = part.d_keys ? part.d_keys + (first - part.first) * stride() : nullptr;
    s.window.d_values = part.d_values ? part.d_values + (first - part.first) * stride_v() : nullptr;
    T* const dq = in.dq ? s.dq : nullptr;
    key_range ranges[max_rows];
    for (idx_t g = 0; g < shape().group(); ++g) {
      const idx_t h = kv * shape().group() + g;
      const auto terms = in.terms().for_head(b, h, at);
      const auto of_compressed = forward.compressed_terms(terms, p.query_heads[g].seen, b);
      auto back = in.back(terms);
      backward_keys<P> compressed = p.query_heads[g].compressed;
      compressed.d_keys = compressed_keys() ? p.query_heads[g].d_keys.part(n) : nullptr;
      compressed.d_values = compressed_values() ? p.query_heads[g].d_values.part(n) : nullptr;
      for (idx_t i = begin; i < end; i += max_rows) {
        const idx_t rows = (std::min)(max_rows, end - i);
        const index_map which{i, 1, nullptr};
        in.pack_rows(s.rows, b, h, head_of(in.q, b, h), which, rows);
        if (dq) std::fill_n(dq, max_rows * stride(), T(0));
        for (idx_t r = 0; r < rows; ++r) {
          const key_range seen = forward.window(i + r + at, length);
          ranges[r] = {seen.begin - first, seen.end - first};
        }
        differentiate(s.rows, rows, ranges, which, s.window, terms, s.block, dq, stride(), back);
        for (idx_t r = 0; r < rows; ++r)
          ranges[r] = {0, forward.rank() * forward.finished(length, in.forward.causal ? i + r + at + 1 : length)};
        differentiate(s.rows, rows, ranges, which, compressed, of_compressed, s.block, dq, stride(), back);
        for (idx_t r = 0; dq && r < rows; ++r)
          store_gradient_row(dq + r * stride(), terms.scale, head_of(in.dq, b, h), i + r, in.accumulate);
      }
    }
  }
  void part_back(const head& p, idx_t b, idx_t kv, idx_t n, int worker) const {
    const idx_t queries = in.lengths().queries(b);
    const idx_t begin = segment_begin(n, queries, parts()), end = segment_begin(n + 1, queries, parts());
    long_short_part<T>& part = p.parts[n];
    part.first = part.end = 0;
    if (begin < end) {
      part.first = forward.window(begin + shift(b), keys(b)).begin;
      part.end = forward.window(end - 1 + shift(b), keys(b)).end;
    }
    const idx_t rows = part.end - part.first + panel_width<T>;
    if (part.d_keys) std::fill_n(part.d_keys, rows * stride(), T(0));
    if (part.d_values) std::fill_n(part.d_values, rows * stride_v(), T(0));
    for (idx_t g = 0, sums = compressed_rows(b); g < shape().group(); ++g)
      p.query_heads[g].d_keys.clear(n, sums), p.query_heads[g].d_values.clear(n, sums);
    auto scratch = exec().scratch(worker, [&](arena& memory) { return queries_layout(memory); });
    for (idx_t at = begin; at < end; at += forward.chunk())
      chunk_back(p, b, kv, n, at, (std::min)(at + forward.chunk(), end), scratch);
  }
  /// Rows of padding of one query head.
  void clear_queries(const head&, idx_t b, idx_t kv, idx_t g, int) const {
    store_gradient_rows<T>(nullptr, 0, T(0), head_of(in.dq, b, kv * shape().group() + g), in.lengths().queries(b),
                           shape().queries, 0, in.accumulate);
  }

  // Keys --------------------------------------------------------------------------------------------------------------

  /// The gradients of a block of keys by the windows of all parts, through the local norm.
  void gather_windows(const head& p, idx_t b, idx_t kv, idx_t block, int worker) const {
    const idx_t begin = block * part_size, end = (std::min)(begin + part_size, keys(b));
    T* const x = exec().scratch(worker, [&](arena& memory) { return memory.allocate<T>(shape().dim); });
    const seen_range seen = forward.key_mask.range(b, begin, end);
    if (p.local) p.local[block].clear();
    const auto gather = [&](const matrix_view<const S>& from, T* long_short_part<T>::*sums_of, T* to, idx_t row_stride,
                            T factor) {
      for (idx_t j = begin; j < end; ++j) {
        T* const row = to + j * row_stride;
        std::fill_n(row, row_stride, T(0));
        for (idx_t n = 0; n < parts(); ++n) {
          const long_short_part<T>& part = p.parts[n];
          if (j < part.first || j >= part.end) continue;
          const T* const sums = part.*sums_of + (j - part.first) * row_stride;
          for (idx_t d = 0; d < row_stride; ++d) row[d] += sums[d] * factor;
        }
        if (!forward.local || seen.hides(j - begin)) continue;
        for (idx_t d = 0; d < from.cols; ++d) x[d] = static_cast<T>(from.row(j)[d * from.col_stride]);
        norm_back(forward.local, x, from.cols, row, p.local[block]);
      }
    };
    if (p.d_keys) gather(head_of(in.k, b, kv), &long_short_part<T>::d_keys, p.d_keys, stride(), in.terms().scale);
    if (p.d_values) gather(head_of(in.v, b, kv), &long_short_part<T>::d_values, p.d_values, stride_v(), T(1));
  }

  /// The gradients of the compressed rows of one head, through the global norm, and the sums of them that the softmax
  /// over tokens needs.
  void compressed_back(const head& p, idx_t b, idx_t kv, idx_t g, int) const {
    query_data& m = p.query_heads[g];
    const idx_t h = kv * shape().group() + g, rows = compressed_rows(b), dim = shape().dim, dim_v = shape().dim_v;
    const norm_sums<T> norm{global_sums + (b * shape().heads + h) * norm_sums<T>::size(dim), dim};
    if (m.d_keys.rows > 0) m.d_keys.merge(in.terms().scale, rows);
    if (m.d_values.rows > 0) m.d_values.merge(T(1), rows);
    for (idx_t r = 0; r < rows; ++r) {
      if (forward.key_mask && !m.seen[r]) continue;  // its tokens take no gradient from it
      const auto back = [&](const T* x, const sums_in_parts<T>& sums, idx_t cols) {
        if (sums.rows == 0) return T(0);
        if (forward.global) norm_back(forward.global, x, cols, sums.row(r), norm);
        T dot = T(0);
        for (idx_t d = 0; d < cols; ++d) dot += x[d] * sums.row(r)[d];
        return dot;
      };
      m.delta[r] = back(m.sums.all_keys + r * m.sums.padded(), m.d_keys, dim);
      m.delta[r] += back(m.sums.all_values + r * m.sums.padded_v(), m.d_values, dim_v);
    }
  }

  idx_t segment_blocks(idx_t b) const { return ceil_div(forward.segment(keys(b)), few_rows_block); }
  /// Number of blocks of tokens in the segments of the longest sequence.
  idx_t token_blocks() const {
    return in.forward.causal ? shape().keys / forward.causal_segment * ceil_div(forward.causal_segment, few_rows_block)
                          : ceil_div(shape().keys, few_rows_block);
  }

  /// A block of tokens of one segment.
  void tokens_back(const head& p, idx_t b, idx_t kv, idx_t block, int worker) const {
    const idx_t segment = block / segment_blocks(b), size = forward.segment(keys(b)), rank = forward.rank();
    if (segment >= forward.segments(b)) return;
    const idx_t begin = segment * size + block % segment_blocks(b) * few_rows_block;
    const idx_t count = (std::min)(few_rows_block, (segment + 1) * size - begin);
    auto s = exec().scratch(
        worker, [&](arena& memory) { return compressed_tokens<T>::layout(memory, rank, shape().dim, shape().dim_v); });
    const seen_range seen = forward.key_mask.range(b, begin, begin + count);
    if (wanted.logits) {
      s.block.x.pack(head_of(in.k, b, kv), begin, count, true, false);
      s.block.y.pack(head_of(in.v, b, kv), begin, count, true, false);
    }
    for (idx_t g = 0; g < shape().group(); ++g) {
      const query_data& m = p.query_heads[g];
      const idx_t h = kv * shape().group() + g, row = segment * rank;
      const auto rows = [&](const sums_in_parts<T>& sums, idx_t cols) {
        return matrix_view<const T>{sums.row(row), rank, cols, sums.stride, 1};
      };
      if (m.d_keys.rows > 0) s.keys.pack(rows(m.d_keys, shape().dim), rank, T(1));
      if (m.d_values.rows > 0) s.values.pack(rows(m.d_values, shape().dim_v), rank, T(1));
      s.weigh(head_of(forward.logits, b, h), begin, count, m.maximum + row, m.share + row);
      if (in.dk) s.keys.weighted_sums(s.block.weights, count, p.d_keys + begin * stride(), stride(), true);
      if (in.dv) s.values.weighted_sums(s.block.weights, count, p.d_values + begin * stride_v(), stride_v(), true);
      if (!wanted.logits) continue;
      s.keys.scores(s.block.x.columns, count, s.block.d_scores);
      s.values.scores(s.block.y.columns, count, s.block.d_scores, few_rows_stride, true);
      s.store_logits(head_of(wanted.logits, b, h), begin, count, seen, m.delta + row, in.accumulate);
    }
    store_tokens(p, b, kv, begin, begin + count);
  }
  void add_local_norms(const head& p, idx_t b, idx_t kv, idx_t, int) const {
    const norm_sums<T> sums{local_sums + (b * shape().kv_heads + kv) * norm_sums<T>::size(shape().dim), shape().dim};
    for (idx_t n = 0; p.local && n < key_blocks(); ++n) sums.add(p.local[n]);
  }
  /// Tokens of no finished segment, and those of padding.
  void rest_back(const head& p, idx_t b, idx_t kv, idx_t, int) const {
    const idx_t begin = forward.segments(b) * forward.segment(keys(b));
    store_tokens(p, b, kv, begin, shape().keys);
    for (idx_t g = 0; wanted.logits && !in.accumulate && g < shape().group(); ++g)
      clear_rows(head_of(wanted.logits, b, kv * shape().group() + g), begin, shape().keys);
  }
  void store_tokens(const head& p, idx_t b, idx_t kv, idx_t begin, idx_t end) const {
    const idx_t real = (std::min)(end, keys(b));
    const seen_range seen = forward.key_mask.range(b, begin, real);
    if (in.dk) seen.clear_rows(p.d_keys + begin * stride(), real - begin, stride());
    if (in.dv) seen.clear_rows(p.d_values + begin * stride_v(), real - begin, stride_v());
    if (in.dk)
      store_gradient_rows(p.d_keys, stride(), T(1), head_of(in.dk, b, kv), begin, end, keys(b), in.accumulate);
    if (in.dv)
      store_gradient_rows(p.d_values, stride_v(), T(1), head_of(in.dv, b, kv), begin, end, keys(b), in.accumulate);
  }

  // -------------------------------------------------------------------------------------------------------------------

  void run_wave(const wave<head>& w) const {
    using self = long_short_backward_driver;
    const idx_t group = shape().group();
    const auto each = [&](idx_t steps, auto step) { for_each_head(w, shape().kv_heads, steps, *this, step); };
    idx_t most_parts = 0;
    for (idx_t b = 0; b < shape().batch; ++b) most_parts = (std::max)(most_parts, forward.parts(b));
    each(group * most_parts, &self::add_part);
    each(group, &self::pack_compressed);
    each(parts(), &self::part_back);
    each(in.dq ? group : 0, &self::clear_queries);
    if (!any()) return;
    each(key_blocks(), &self::gather_windows);
    each(group, &self::compressed_back);
    each(1, &self::add_local_norms);
    if (!in.dk && !in.dv && !wanted.logits) return;
    each(token_blocks(), &self::tokens_back);
    each(1, &self::rest_back);
  }

  /// gamma and beta: the sums over heads and batch items, in order.
  void store_norm(const T* sums, idx_t count, const tensor_view<T, 1>& gamma, const tensor_view<T, 1>& beta) const {
    const idx_t dim = shape().dim;
    const auto store = [&](const tensor_view<T, 1>& to, const T* from) {
      for (idx_t d = 0; d < to.extent(0); ++d) {
        T sum = T(0);
        for (idx_t n = 0; n < count; ++n) sum += from[n * norm_sums<T>::size(dim) + d];
        store_gradient(to(d), sum, in.accumulate);
      }
    };
    store(gamma, sums);
    store(beta, sums + dim);
  }

  void run() {
    if (!in.dq && !any()) return;
    const idx_t item_heads = shape().batch * shape().kv_heads, heads = shape().batch * shape().heads;
    const idx_t size = norm_sums<T>::size(shape().dim);
    const auto sums = exec().workspace([&](arena& memory) {
      T* const local = memory.allocate<T>(item_heads * size);
      return std::array{local, memory.allocate<T>(heads * size)};
    });
    local_sums = (*sums)[0], global_sums = (*sums)[1];
    std::fill_n(local_sums, item_heads * size, T(0));
    std::fill_n(global_sums, heads * size, T(0));
    for (const auto& w : waves_of(exec(), item_heads, [&](arena& memory) { return layout(memory); })) run_wave(w);
    store_norm(local_sums, item_heads, wanted.local_gamma, wanted.local_beta);
    store_norm(global_sums, heads, wanted.global_gamma, wanted.global_beta);
  }
};

template <class S>
void run_long_short_backward(softmax_backward_call<S, no_score, no_score_backward>& call,
                             const long_short_call<S>& checked, const long_short_parameter_gradients<S>& wanted) {
  const long_short_driver<S> forward{checked};
  softmax_backward_work work(call, 2.7 * forward.scores() * call.shape.operations_per_score());
  if (work.needs_lse()) forward.run();
  long_short_backward_driver<S>{.in = call, .forward = forward, .wanted = wanted}.run();
  work.store_parameters();
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN(S) void run_long_short_backward(softmax_backward_call<S, no_score, no_score_backward>&,               \
  const long_short_call<S>&, const long_short_parameter_gradients<S>&)
#include <attn/core/detail/compiled.hpp>
