// attn: the arguments of the backward passes of exact softmax attention: their checks, and the form in which drivers
// see them.
//
//   template <viewable Q, ..., class Options = NAME_options<element_of<const Q&>>, class Score = detail::no_score,
//             class ScoreBackward = detail::no_score_backward>
//   void NAME_backward(const Q& q, ..., const D& d_out, const NAME_gradients<element_of<const Q&>>& gradients,
//                      Options&& options = {}, Score&& score = {}, ScoreBackward&& score_backward = {},
//                      execution_ref exec = {}) {
//     detail::call_softmax_backward<NAME_options>("NAME_backward", q, k, v, out, d_out, gradients, options, score,
//                                                 score_backward, exec, [](auto& call, const auto& given) {
//       /* own checks */
//       call.run([](auto& forward) { /* writes forward.lse */ }, [](auto& call) { /* the driver */ });
//     });
#pragma once

#include <attn/core/detail/gradients.hpp>
#include <attn/softmax/detail/backward_terms.hpp>
#include <attn/softmax/detail/blockwise_backward.hpp>
#include <attn/softmax/detail/softmax_call.hpp>

namespace attn::inline ATTN_ISA::detail {

/// sum over d < count of x[d] y[d]
template <class T, class S>
T row_dot(const S* x, idx_t x_stride, const S* y, idx_t y_stride, idx_t count) {
  packet<T> sum = zero<T>();
  for (idx_t d = 0; d < count; d += width<T>)
    sum = fma(load_part<T>(x + d * x_stride, x_stride, count - d), load_part<T>(y + d * y_stride, y_stride, count - d),
              sum);
  return sum_lanes(sum);
}

/// A vector as the last axis of a view, for the checks.
template <class T>
memory_layout list_layout(std::span<const T> list) {
  return tensor_view<const T, 1>(list.empty() ? nullptr : list.data(), {static_cast<idx_t>(list.size())});
}

/// A backward call after the checks that all operators share. The gradients of q, k and v have elements G: S, or the
/// compute type where they are added up further.
template <class S, class Score, class ScoreBackward, class G = S>
struct softmax_backward_call {
  using T = compute_type<S>;

  softmax_call<S, Score> forward;  // the forward call without values, which computes lse where it is not given
  tensor_view<const S> q, k, v, out, d_out;
  attention_shape shape;
  tensor_view<G> dq, dk, dv;
  tensor_view<T, 1> d_slopes, d_sinks;
  tensor_view<T> d_bias{};
  tensor_view<const T, 3> d_lse;
  bool accumulate;
  ScoreBackward* score_backward;

  tensor_view<const T, 3> lse{}, maximum{};  // as in softmax_inputs
  T* slope_sums = nullptr;  // [batch * heads]: the gradients of each head's slope, where they are asked for

  const sequence_lengths& lengths() const { return forward.lengths; }
  const score_terms<T, Score>& terms() const { return forward.terms; }
  /// The backward terms of one head; they refer to `one`.
  auto back(const score_terms<T, Score>& one) const {
    return backward_terms<T, Score, ScoreBackward>{
        .terms = one, .score_backward = score_backward, .d_bias = d_bias, .sum_slope = bool(d_slopes)};
  }
  template <class P = product_type<S>>
  backward_scratch<P> layout_scratch(arena& memory) const {
    return backward_scratch<P>::layout(memory, shape.dim, shape.dim_v, back(terms()).need_raw());
  }

  /// Packs `count` rows which[...] of head h, from `query`, with their lse and D, into one block, which they fill
  /// alone.
  template <class P>
  void pack_rows(const backward_rows<P>& to, idx_t b, idx_t h, const matrix_view<const S>& query,
                 const index_map& which,
                 idx_t count) const {
    const auto o = head_of(out, b, h), d = head_of(d_out, b, h);
    to.pack(query, d, which, count);
    for (idx_t r = 0; r < count; ++r) {
      const idx_t i = which[r];
      const row_lse of = lse_of(b, h, i);
      const bool sees = of.sees();
      to.maximum[r] = sees ? of.maximum : T(0);
      to.log_sum[r] = sees ? of.log_sum : T(0);
      to.delta[r] = sees ? delta(o, d, b, h, i) : T(0);
    }
    for (T* x : {to.maximum, to.log_sum, to.delta}) std::fill(x + count, x + max_rows, T(0));
  }
  /// lse in base 2, in two parts: one number loses the digits of the sum where scores are large. Given as one number, it
  /// counts as the maximum.
  struct row_lse {
    T maximum, log_sum;
    bool sees() const {
      constexpr T none = -std::numeric_limits<T>::infinity();
      return log_sum != none && maximum != none;
    }
  };
  row_lse lse_of(idx_t b, idx_t h, idx_t i) const {
    if (maximum) return {maximum(b, h, i), lse(b, h, i)};
    return {lse(b, h, i) * log2_e<T>, T(0)};
  }
  T delta(const matrix_view<const S>& o, const matrix_view<const S>& d, idx_t b, idx_t h, idx_t i) const {
    const T dot = row_dot<T>(o.row(i), o.col_stride, d.row(i), d.col_stride, shape.dim_v);
    return d_lse ? dot - d_lse(b, h, i) : dot;
  }

  /// Computes lse by recompute(forward) unless it is given by a forward pass with the same products, calls body(*this),
  /// then stores the gradients of the parameters of heads. `operations` are those of the backward pass.
  template <class Recompute, class Body>
  void run(double operations, const Recompute& recompute, const Body& body) {
    execution& exec = forward.exec;
    const auto limit = exec.limit_threads({.operations = operations});
    // Weights are e^(score - lse): lse must come from the same kind of products as the scores.
    if (uses_fast_products<S>(exec)) forward.lse = {};
    const standard_products standard(exec);
    const idx_t heads = shape.batch * shape.heads;
    struct saved {
      T *lse, *maximum, *slopes, *sinks;
    };
    const auto memory = exec.workspace([&](arena& m) {
      const idx_t rows = forward.lse ? 0 : heads * shape.queries;
      return saved{m.allocate<T>(rows), m.allocate<T>(rows), m.allocate<T>(d_slopes ? heads : 0),
                  m.allocate<T>(d_sinks ? heads : 0)};
    });
    if (!forward.lse) {
      forward.lse = {memory->lse, {shape.batch, shape.heads, shape.queries}};
      forward.maximum = {memory->maximum, {shape.batch, shape.heads, shape.queries}};
      recompute(forward);
    }
    lse = forward.lse, maximum = forward.maximum;
    slope_sums = memory->slopes;
    std::fill_n(slope_sums, d_slopes ? heads : 0, T(0));
    body(*this);
    if (d_slopes) store_per_head(memory->slopes, d_slopes);
    if (!d_sinks) return;
    exec.for_each(heads, [&](idx_t n, int) { memory->sinks[n] = sink_gradient(n / shape.heads, n % shape.heads); });
    store_per_head(memory->sinks, d_sinks);
  }

 private:
  /// The gradient of the sink of one head: - sum_i e^(sink - lse_i) D_i.
  T sink_gradient(idx_t b, idx_t h) const {
    const auto o = head_of(out, b, h), d = head_of(d_out, b, h);
    const T sink = forward.sinks[static_cast<std::size_t>(h)];
    double sum = 0;
    for (idx_t i = 0; i < lengths().queries(b); ++i)
      if (const row_lse of = lse_of(b, h, i); of.sees())
        sum -= static_cast<double>(std::exp2(to_base_2(sink) - of.maximum - of.log_sum) * delta(o, d, b, h, i));
    return static_cast<T>(sum);
  }
  void store_per_head(const T* sums, const tensor_view<T, 1>& to) const {
    for (idx_t h = 0; h < shape.heads; ++h) {
      T sum = 0;
      for (idx_t b = 0; b < shape.batch; ++b) sum += sums[b * shape.heads + h];
      store_gradient(to(h), sum, accumulate);
    }
  }
};

/// The views that every softmax backward pass checks, those of its options and gradients included.
template <class S, class Call, class Options, class Gradients>
void check_softmax_backward(const Call& call, const Options& options, const Gradients& g) {
  using T = compute_type<S>;
  const validator& check = call.forward.check;
  backward_views views;
  views.gradient("the gradient of q", g.q, "q", call.q);
  if constexpr (requires { g.k; }) views.gradient("the gradient of k", g.k, "k", call.k);
  views.gradient("the gradient of v", g.v, "v", call.v);
  if constexpr (requires { g.bias; }) views.gradient("the gradient of bias", g.bias, "bias", options.bias);
  if constexpr (requires { g.alibi_slopes; })
    views.gradient("the gradient of alibi_slopes", g.alibi_slopes, "alibi_slopes", list_layout<T>(options.alibi_slopes));
  views.gradient("the gradient of sinks", g.sinks, "sinks", list_layout<T>(options.sinks));
  if constexpr (requires { g.q_global; }) {
    views.gradient("the gradient of q_global", g.q_global, "q_global", options.q_global);
    views.gradient("the gradient of k_global", g.k_global, "k_global", options.k_global);
    views.gradient("the gradient of v_global", g.v_global, "v_global", options.v_global);
  }
  if constexpr (requires { options.permutation; }) views.read("permutation", options.permutation);
  if constexpr (requires { options.random; }) views.read("random", options.random);
  if constexpr (requires { options.rotations; }) views.read("rotations", options.rotations);
  if constexpr (requires { options.mask; }) views.read("mask", options.mask.bytes());
  views.read("out", call.out);
  views.read("d_out", call.d_out);
  views.read("lse", options.lse);
  views.read("d_lse", g.d_lse);
  views.check(check);
  const tensor_view<const T, 3> rows(nullptr, {call.shape.batch, call.shape.heads, call.shape.queries});
  check_same_shape(check, "d_out", call.d_out, "out", call.out);
  if (options.lse) check_same_shape(check, "lse", options.lse, "the rows of out", rows);
  if (g.d_lse) check_same_shape(check, "d_lse", g.d_lse, "the rows of out", rows);
}

/// Checks the arguments and what all options have in common, then calls body(softmax_backward_call, options).
template <template <class> class Options, class Q, class K, class V, class O, class D, class Gradients, class Given,
          class Score, class ScoreBackward, class Body>
void call_softmax_backward(const char* name, const Q& q, const K& k, const V& v, const O& out, const D& d_out,
                           const Gradients& gradients, Given& options, Score& score, ScoreBackward& score_backward,
                           execution_ref& exec, const Body& body) {
  using S = element_of<const Q&>;
  using T = compute_type<S>;
  require_one_element_type<const Q&, const K&, const V&, tensor_view<S>>();
  require_one_element_type<const Q&, const O&, const D&, tensor_view<S>>();
  const auto& given = options_or_default<Options<S>>(options);
  auto&& function = callable_or_default<no_score>(score);
  auto&& derivative = callable_or_default<no_score_backward>(score_backward);
  using score_type = std::remove_reference_t<decltype(function)>;
  using backward_type = std::remove_reference_t<decltype(derivative)>;
  require_score<score_type, T>();
  require_score_backward<score_type, backward_type, T>();

  const tensor_view<const S> values = as_view(v);
  using gradient_element = typename decltype(gradients.v)::value_type;
  softmax_backward_call<S, score_type, backward_type, gradient_element> call{
      .forward = {{.q = as_view(q), .k = as_view(k), .v = {}, .out = {}, .sinks = given.sinks, .lse = given.lse},
                  validator(name), {}, execution_of(exec, options, score, score_backward)},
      .q = as_view(q), .k = as_view(k), .v = values, .out = as_view(out), .d_out = as_view(d_out), .shape = {},
      .dq = gradients.q, .dk = {}, .dv = gradients.v, .d_slopes = {}, .d_sinks = gradients.sinks,
      .d_lse = gradients.d_lse, .accumulate = gradients.accumulate, .score_backward = &derivative};
  if constexpr (requires { gradients.k; }) call.dk = gradients.k;
  if constexpr (requires { gradients.alibi_slopes; }) call.d_slopes = gradients.alibi_slopes;
  auto& forward = call.forward;
  call.shape = check_attention_extents(forward.check, call.q, call.k, call.v, call.out);
  check_softmax_backward<S>(call, given, gradients);
  forward.shape = call.shape;
  forward.lengths = {.full_queries = call.shape.queries, .full_keys = call.shape.keys};
  if constexpr (requires { given.key_lengths; }) forward.lengths = check_lengths(forward.check, call.shape, given);
  if constexpr (requires { given.causal; }) forward.causal = given.causal;
  if constexpr (requires { given.first_position; })
    forward.first_position = checked_position(forward.check, given.first_position);
  check_softmax_numbers(forward.check, call.shape, given);
  check_mask(forward.check, call.shape, given);
  forward.terms = terms_of<T>(given, call.shape.dim, &function);
  forward.shape.dim_v = 0;
  forward.v = values.slice(3, 0, 0);
  forward.out = {nullptr, {call.shape.batch, call.shape.heads, call.shape.queries, 0}};
  body(call, given);
}

}  // namespace attn::inline ATTN_ISA::detail
