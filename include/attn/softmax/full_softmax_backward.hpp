// attn: the gradients of full_softmax.
//
//   attn::full_softmax(q, k, v, out, {.causal = true, .lse = lse}, threads);
//   attn::full_softmax_backward(q, k, v, out, d_out, {.q = dq, .k = dk, .v = dv}, {.causal = true, .lse = lse}, threads);
//   attn::full_softmax_backward(q, k, v, out, d_out, {.q = dq}, {}, score, score_backward);    // with a score function
//
// With P_ij = e^(s_ij - lse_i) and D_i = d_out_i . out_i - d_lse_i, s the final scores:
//   dv_j = sum_i P_ij d_out_i,  ds_ij = P_ij (d_out_i . v_j - D_i),  dq_i = scale sum_j ds'_ij k_j,
//   dk_j = scale sum_i ds'_ij q_i, ds' = ds times the derivative of softcap and score function; dbias_ij = ds_ij before
//   softcap's; dsink = -sum_i e^(sink - lse_i) D_i.           Dao et al. 2022, "FlashAttention", appendix B
//
// Shapes   q, k, v, out, the options: as the forward call's; out and options.lse are what it wrote. d_out as out,
//          d_lse as lse. Gradients have the shapes of what they are of; dk and dv are summed over the query heads of a
//          group, dbias over what bias was broadcast over.
// Cost     2 B H Lq Lk (3 D + 2 Dv) operations, half of it when causal; without lse, one product more. Scratch, per key
//          head under way: about Lk (4 D + 3 Dv) + Lq (6 D + 2 Dv) numbers, with threads that share a head up to 7 Lq D
//          more; never Lq x Lk.
// Throws   std::invalid_argument for shapes or options that do not fit, for gradients of what was not given or that share
//          memory with an input or one another, before anything is written.
//
// A row that sees no key has gradient 0. score_backward(s, d, batch, head, i, j) gives d times the derivative of
// score(s, batch, head, i, j) by s.
#pragma once

#include <attn/core/detail/arguments.hpp>
#include <attn/core/detail/waves.hpp>
#include <attn/softmax/detail/backward_terms.hpp>
#include <attn/softmax/detail/blockwise_backward.hpp>
#include <attn/softmax/full_softmax.hpp>

namespace attn::inline ATTN_ISA {

/// The gradients full_softmax_backward writes: those given. S is the element type of the call.
template <class S>
struct full_softmax_gradients {
  using real = compute_type<S>;

  tensor_view<S> q{}, k{}, v{};
  /// As bias: [B or 1, H or 1, Lq or 1, Lk].
  tensor_view<real> bias{};
  /// [H]
  tensor_view<real, 1> alibi_slopes{}, sinks{};
  /// Read, not written: the gradient of lse, [B, H, Lq].
  tensor_view<const real, 3> d_lse{};
  /// Add to what is there, instead of writing it over.
  bool accumulate = false;
};

namespace detail {

/// Keys of a segment, whose part of dq is summed up apart: an eighth of the keys, at least 512. Depends on the shape
/// only, so that threads do not change the sums.
inline index backward_segment(index keys) {
  return round_up(std::max<index>(512, ceil_div(keys, 8)), backward_key_block);
}

/// The driver of full_softmax_backward.
template <class S, class Score, class ScoreBackward>
struct full_softmax_backward_call {
  using T = compute_type<S>;
  static constexpr index pack_step = 512;

  tensor_view<const S> q, k, v, out, d_out;
  const full_softmax_options<S>& options;
  const full_softmax_gradients<S>& gradients;
  tensor_view<const T, 3> lse;
  attention_shape shape;
  sequence_lengths lengths;
  score_terms<T, Score> terms;
  ScoreBackward* score_backward;

  /// What the threads share of one pair of batch item and key head.
  struct pair_scratch {
    backward_keys<T> keys;
    backward_rows<T> rows;  // of the query head under way
    T* dq;                  // [parts + 1][Lq][dq_stride]: sums of segments under way, and of all that are done
    T* slopes;              // [segments]: their sums of the gradient of the slope
    T* bias;
  };

  index dq_stride() const { return round_up(shape.dim, panel_width<T>); }
  index rows() const { return round_up(shape.queries, max_rows); }
  index segments() const { return ceil_div(shape.keys, backward_segment(shape.keys)); }
  index row_blocks() const { return ceil_div(shape.queries, max_rows); }
  bool needs_raw() const { return options.softcap || terms.scored; }

  pair_scratch layout(arena& memory, index parts) const {
    return {.keys = backward_keys<T>::layout(memory, shape.keys, shape.dim, shape.dim_v),
            .rows = backward_rows<T>::layout(memory, shape.queries, shape.dim, shape.dim_v),
            .dq = memory.allocate<T>((parts + 1) * rows() * dq_stride()),
            .slopes = memory.allocate<T>(segments()),
            .bias = nullptr};
  }

  index end_of(index b, index i) const {
    const index keys = lengths.keys(b);
    return options.causal ? std::clamp(i + keys - lengths.queries(b) + 1, index(0), keys) : keys;
  }

  /// Packs the rows of one block, and their lse and D.
  void pack_rows_of(index b, index h, index i0, const pair_scratch& s) const {
    const index count = std::min(max_rows, lengths.queries(b) - i0);
    if (count <= 0) return;
    const backward_rows<T> to = s.rows.from(i0);
    to.pack(head_of(q, b, h), head_of(d_out, b, h), {i0, 1, nullptr}, count, terms.query_factor());
    const auto o = head_of(out, b, h), d = head_of(d_out, b, h);
    for (index r = 0; r < count; ++r) {
      const T log_sum = lse(b, h, i0 + r);
      to.lse[r] = log_sum == -std::numeric_limits<T>::infinity() ? T(0) : log_sum * log2_e<T>;
      to.delta[r] = row_dot<T>(o.row(i0 + r), o.col_stride, d.row(i0 + r), d.col_stride, shape.dim_v) -
                    (gradients.d_lse ? gradients.d_lse(b, h, i0 + r) : T(0));
      if (log_sum == -std::numeric_limits<T>::infinity()) to.delta[r] = T(0);
    }
    for (T* x : {to.lse, to.delta}) std::fill(x + count, x + max_rows, T(0));
    std::fill_n(s.dq + i0 * dq_stride(), max_rows * dq_stride(), T(0));
  }

  /// One segment of keys with all rows of a head; dq [rows][dq_stride] takes its part.
  void add_segment(index b, index h, index segment, const pair_scratch& s, T* dq, const backward_scratch<T>& scratch) const {
    const index begin = segment * backward_segment(shape.keys), queries = lengths.queries(b);
    const index end = std::min(begin + backward_segment(shape.keys), lengths.keys(b));
    std::fill_n(dq, rows() * dq_stride(), T(0));
    const auto head_terms = terms.for_head(b, h, lengths.keys(b) - queries);
    backward_terms<T, Score, ScoreBackward> chain{.terms = head_terms,
                                                  .score_backward = score_backward,
                                                  .positions = s.keys.keys.positions,
                                                  .d_bias = gradients.bias};
    key_range ranges[max_rows];
    for (index from = begin; from < end; from += backward_key_block)
      for (index i0 = 0; i0 < queries; i0 += max_rows) {
        const index count = std::min(max_rows, queries - i0);
        for (index r = 0; r < count; ++r) ranges[r] = {0, end_of(b, i0 + r)};
        backward_block(s.rows.from(i0), count, ranges, {i0, 1, nullptr}, s.keys, from,
                       std::min(from + backward_key_block, end), head_terms, scratch, dq + i0 * dq_stride(),
                       dq_stride(), chain);
      }
    if (gradients.alibi_slopes) s.slopes[segment] = chain.d_slope;
  }

  template <class To>
  void put(To& to, T value) const {
    to = static_cast<To>(gradients.accumulate ? static_cast<T>(to) + value : value);
  }
  /// Rows [begin, end) of sums, times `factor`, as rows of a gradient; rows of padding become 0.
  void store_rows(const T* sums, index stride, T factor, const matrix_view<S>& to, index begin, index end,
                  index real) const {
    for (index i = begin; i < end; ++i)
      for (index d = 0; d < to.cols; ++d)
        put(to.row(i)[d * to.col_stride], i < real ? sums[i * stride + d] * factor : T(0));
  }

  /// Adds the gradients of the sink and, from the segments, of the slope of head h.
  void add_head_parameters(index b, index h, const pair_scratch& s) const {
    if (gradients.sinks) {
      const T sink = options.sinks[static_cast<std::size_t>(h)];
      T sum = 0;
      for (index i = 0; i < lengths.queries(b); ++i)
        if (const T log_sum = lse(b, h, i); log_sum != -std::numeric_limits<T>::infinity())
          sum -= std::exp(sink - log_sum) * s.rows.delta[i];
      gradients.sinks(h) += sum;
    }
    for (index n = 0; gradients.alibi_slopes && n < segments(); ++n) gradients.alibi_slopes(h) += s.slopes[n];
  }

  void attend(const wave<pair_scratch>& pairs, index parts) const {
    execution& exec = pairs.exec;
    const auto batch_of = [&](index pair) { return pair / shape.kv_heads; };
    const auto kv_of = [&](index pair) { return pair % shape.kv_heads; };
    pairs.for_each(ceil_div(shape.keys, pack_step), [&](index pair, pair_scratch& s, index step, int) {
      const index b = batch_of(pair), begin = step * pack_step, end = std::min(begin + pack_step, lengths.keys(b));
      if (begin < end) s.keys.pack(head_of(k, b, kv_of(pair)), head_of(v, b, kv_of(pair)), begin, end);
    });
    for (index g = 0; g < shape.group(); ++g) {
      const auto head_of_pair = [&](index pair) { return kv_of(pair) * shape.group() + g; };
      pairs.for_each(row_blocks(), [&](index pair, pair_scratch& s, index block, int) {
        pack_rows_of(batch_of(pair), head_of_pair(pair), block * max_rows, s);
      });
      const index size = rows() * dq_stride();
      const auto scratch_of = [&](int worker) {
        return exec.scratch(worker, [&](arena& memory) { return backward_scratch<T>::layout(memory, needs_raw()); });
      };
      for (index first = 0; first < segments(); first += parts) {
        const index count = std::min(parts, segments() - first);
        pairs.for_each(count, [&](index pair, pair_scratch& s, index n, int worker) {
          add_segment(batch_of(pair), head_of_pair(pair), first + n, s, s.dq + (n + 1) * size, scratch_of(worker));
        });
        pairs.for_each(row_blocks(), [&](index, pair_scratch& s, index block, int) {
          T* const total = s.dq + block * max_rows * dq_stride();
          for (index n = 1; n <= count; ++n)
            for (index x = 0; x < max_rows * dq_stride(); x += width<T>)
              store<T>(total + x, add(load<T>(total + x), load<T>(total + n * size + x)));
        });
      }
      pairs.for_each(row_blocks(), [&](index pair, pair_scratch& s, index block, int) {
        const index b = batch_of(pair), h = head_of_pair(pair), i0 = block * max_rows;
        if (gradients.q)
          store_rows(s.dq, dq_stride(), terms.scale, head_of(gradients.q, b, h), i0,
                     std::min(i0 + max_rows, shape.queries), lengths.queries(b));
      });
      for (index n = 0; n < pairs.count; ++n)
        add_head_parameters(batch_of(pairs.first + n), head_of_pair(pairs.first + n), pairs.scratch[n]);
    }
    pairs.for_each(ceil_div(shape.keys, pack_step), [&](index pair, pair_scratch& s, index step, int) {
      const index b = batch_of(pair), kv = kv_of(pair), begin = step * pack_step,
                  end = std::min(begin + pack_step, shape.keys), real = lengths.queries(b) > 0 ? lengths.keys(b) : 0;
      if (gradients.k)
        store_rows(s.keys.d_keys, s.keys.stride(shape.dim), terms.scale, head_of(gradients.k, b, kv), begin, end, real);
      if (gradients.v)
        store_rows(s.keys.d_values, s.keys.stride(shape.dim_v), T(1), head_of(gradients.v, b, kv), begin, end, real);
    });
  }

  void run(execution& exec) const {
    const index pairs = shape.batch * shape.kv_heads, threads = exec.active_threads();
    // Where a gradient is a sum over heads or batch items, pairs go one by one, in order.
    const bool in_order = gradients.bias || gradients.sinks || gradients.alibi_slopes;
    const index bytes = static_cast<index>(sizeof(T)) * (shape.keys + shape.queries) * (shape.dim + shape.dim_v) * 3;
    const index size = in_order ? 1 : wave_size(exec, pairs, bytes);
    const index parts = size >= threads ? 1 : std::min<index>(segments(), 8);
    for_each_wave(
        exec, pairs, size, [&](arena& memory) { return layout(memory, std::max<index>(parts, 1)); },
        [&](const wave<pair_scratch>& w) { attend(w, std::max<index>(parts, 1)); });
  }
};

/// A call that has passed its checks. Without lse it is computed first, by a forward pass without values.
template <class S, class Score, class ScoreBackward>
void run_full_softmax_backward(const tensor_view<const S>& q, const tensor_view<const S>& k,
                               const tensor_view<const S>& v, const tensor_view<const S>& out,
                               const tensor_view<const S>& d_out, const full_softmax_gradients<S>& gradients,
                               const full_softmax_options<S>& options, const attention_shape& shape,
                               const sequence_lengths& lengths, Score& score, ScoreBackward& score_backward,
                               execution& exec) {
  using T = compute_type<S>;
  const auto limit = exec.limit_threads(
      {.operations = 2.5 * shape.operations_per_pair() * static_cast<double>(shape.queries) *
                     static_cast<double>(shape.keys) * (options.causal ? 0.5 : 1.0)});
  if (!gradients.accumulate)
    for (const tensor_view<T>& x : {gradients.bias, as_matrix(gradients.sinks), as_matrix(gradients.alibi_slopes)})
      for (index b = 0; b < x.extent(0); ++b)
        for (index h = 0; h < x.extent(1); ++h) clear_rows(head_of(x, b, h), 0, x.extent(2));
  full_softmax_backward_call<S, Score, ScoreBackward> call{.q = q,
                                                           .k = k,
                                                           .v = v,
                                                           .out = out,
                                                           .d_out = d_out,
                                                           .options = options,
                                                           .gradients = gradients,
                                                           .lse = options.lse,
                                                           .shape = shape,
                                                           .lengths = lengths,
                                                           .terms = terms_of<T>(options, shape.dim, &score),
                                                           .score_backward = &score_backward};
  if (options.lse) return call.run(exec);
  const auto sums = exec.workspace([&](arena& memory) { return memory.allocate<T>(shape.batch * shape.heads * shape.queries); });
  full_softmax_options<S> forward = options;
  forward.lse = {*sums, {shape.batch, shape.heads, shape.queries}};
  attention_shape without_values = shape;
  without_values.dim_v = 0;
  full_call<S, Score>{.q = q,
                      .k = k,
                      .v = v.slice(3, 0, 0),
                      .out = {nullptr, {shape.batch, shape.heads, shape.queries, 0}},
                      .options = forward,
                      .shape = without_values,
                      .lengths = lengths,
                      .terms = call.terms}
      .run(exec);
  call.lse = forward.lse;
  call.run(exec);
}

/// Everything full_softmax_backward refuses, it refuses here.
template <class S>
std::pair<attention_shape, sequence_lengths> check_full_softmax_backward(
    const validator& check, const tensor_view<const S>& q, const tensor_view<const S>& k, const tensor_view<const S>& v,
    const tensor_view<const S>& out, const tensor_view<const S>& d_out, const full_softmax_gradients<S>& g,
    const full_softmax_options<S>& options) {
  using T = compute_type<S>;
  const tensor_view<const T, 1> slopes(options.alibi_slopes), sinks(options.sinks);
  check.memory({{"the gradient of q", g.q},
                {"the gradient of k", g.k},
                {"the gradient of v", g.v},
                {"the gradient of bias", g.bias},
                {"the gradient of alibi_slopes", g.alibi_slopes},
                {"the gradient of sinks", g.sinks}},
               {{"q", q},
                {"k", k},
                {"v", v},
                {"out", out},
                {"d_out", d_out},
                {"d_lse", g.d_lse},
                {"lse", options.lse},
                {"bias", options.bias},
                {"alibi_slopes", slopes},
                {"sinks", sinks}});
  const attention_shape s = check_attention_extents(check, q, k, v, out);
  const sequence_lengths lengths = check_lengths(check, s, options);
  check_softmax_numbers(check, s, options);
  if (options.bias) check_bias(check, s, options.bias);
  check_same_shape(check, "d_out", d_out, "out", out);
  const tensor_view<const T, 3> rows(nullptr, {s.batch, s.heads, s.queries});
  if (options.lse) check_same_shape(check, "lse", options.lse, "the rows of out", rows);
  if (g.d_lse) check_same_shape(check, "d_lse", g.d_lse, "the rows of out", rows);
  check_gradient(check, "q", g.q, q);
  check_gradient(check, "k", g.k, k);
  check_gradient(check, "v", g.v, v);
  check_gradient(check, "bias", g.bias, options.bias);
  check_gradient(check, "alibi_slopes", g.alibi_slopes, slopes);
  check_gradient(check, "sinks", g.sinks, sinks);
  return {s, lengths};
}

}  // namespace detail

/// The gradients of full_softmax. See the top of the file.
template <viewable Q, viewable K, viewable V, viewable O, viewable D,
          class Options = full_softmax_options<element_of<const Q&>>, class Score = detail::no_score,
          class ScoreBackward = detail::no_score_backward>
void full_softmax_backward(const Q& q, const K& k, const V& v, const O& out, const D& d_out,
                           const full_softmax_gradients<element_of<const Q&>>& gradients, Options&& options = {},
                           Score&& score = {}, ScoreBackward&& score_backward = {}, execution_ref exec = {}) {
  using S = element_of<const Q&>;
  using T = compute_type<S>;
  detail::require_one_element_type<const Q&, const K&, const V&, tensor_view<S>>();
  detail::require_one_element_type<const Q&, const O&, const D&, tensor_view<S>>();
  const auto& given = detail::options_or_default<full_softmax_options<S>>(options);
  auto&& term = detail::callable_or_default<detail::no_score>(score);
  auto&& term_backward = detail::callable_or_default<detail::no_score_backward>(score_backward);
  using term_type = std::remove_reference_t<decltype(term)>;
  using backward_type = std::remove_reference_t<decltype(term_backward)>;
  detail::require_score<term_type, T>();
  detail::require_score_backward<term_type, backward_type, T>();

  const tensor_view<const S> queries = as_view(q), keys = as_view(k), values = as_view(v), result = as_view(out),
                             d_result = as_view(d_out);
  const auto [shape, lengths] = detail::check_full_softmax_backward<S>(detail::validator("full_softmax_backward"),
                                                                       queries, keys, values, result, d_result,
                                                                       gradients, given);
  execution& e = detail::execution_of(exec, options, score, score_backward);
  detail::run_full_softmax_backward<S>(queries, keys, values, result, d_result, gradients, given, shape, lengths, term,
                                       term_backward, e);
}

}  // namespace attn::inline ATTN_ISA
