// attn: multi-head attention over any operator.
//
//   q = x W_q^T, k = y W_k^T, v = y W_v^T, out = concat over heads of op(q, k, v) W_o^T       Vaswani et al. 2017
//
//   const auto attend = [](auto q, auto k, auto v, auto out, attn::execution& where) {
//     attn::full_softmax(q, k, v, out, {.causal = true}, where);
//   };
//   attn::multi_head(x, out, {.query = wq, .key = wk, .value = wv, .output = wo}, attend, {.heads = 8}, threads);
//   attn::multi_head(x, y, out, weights, attend, {.heads = 8, .kv_heads = 2});    // cross attention, grouped queries
//
// Shapes   x [B, Lq, n], y [B, Lk, m] (x itself unless given), query [heads D, n], key [kv_heads D, m], value [kv_heads
//          Dv, m], output [p, heads Dv], out [B, Lq, p]; biases [rows of their weight]. Head dims follow from the
//          weights' rows. float, double, or Eigen::half / Eigen::bfloat16 in memory with float arithmetic.
//          Without key weights the queries serve as keys (Reformer's shared queries and keys); without output weights
//          the heads stand side by side in out.
// Operator op(q, k, v, out, execution) is called once, with views [B, heads, L, dim] of what was projected: of memory
//          [B, L, heads, dim], so nothing is moved between projections and operator. True lengths, masks and all else
//          are the operator's own options. What lies in padding stays in its row.
// Cost     2 operations a number of x and y and weight row, and the operator. Scratch, beside the operator's: q, k, v
//          and the heads' output, and what projection.hpp needs for the weights.
// Throws   std::invalid_argument for shapes that do not fit, before anything is written; what the operator throws
//          passes through.
#pragma once

#include <attn/layers/project.hpp>

#include <optional>

namespace attn::inline ATTN_ISA {

/// Weights of multi_head: one row for every projected number.
template <class S>
struct multi_head_weights {
  static_assert(element<S>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");
  tensor_view<const S, 2> query{}, key{}, value{}, output{};
  tensor_view<const S, 1> query_bias{}, key_bias{}, value_bias{}, output_bias{};
};

/// Options of multi_head.
struct multi_head_options {
  index heads = 1;
  /// Heads of keys and values; as many as `heads` unless given, and a divisor of it (grouped queries).
  std::optional<index> kv_heads{};
};

/// An attention operator with its options bound: op(q, k, v, out, execution).
template <class F, class S>
concept attention_function = std::invocable<F&, const tensor_view<const S>&, const tensor_view<const S>&,
                                            const tensor_view<const S>&, const tensor_view<S>&, execution&>;

namespace detail {

/// The head dim of a weight whose rows are `heads` heads.
inline index head_dim(const validator& check, const char* what, index rows, index heads) {
  if (rows % heads != 0) check.fail(text({what, " rows divisible by heads ", heads}), rows);
  return rows / heads;
}

struct multi_head_shape {
  index batch, queries, keys, heads, kv_heads, dim, dim_v;
};

/// Everything multi_head refuses, it refuses here.
template <class S>
multi_head_shape check_multi_head(const tensor_view<const S, 3>& x, const tensor_view<const S, 3>& y,
                                  const tensor_view<S, 3>& out, const multi_head_weights<S>& w,
                                  const multi_head_options& options) {
  const validator check("multi_head");
  check.readable("x", x);
  check.readable("y", y);
  check.writable("out", out);
  check.equal("y batch = x batch", x.extent(0), y.extent(0));
  check.at_least("heads", 1, options.heads);
  const index heads = options.heads, kv_heads = options.kv_heads.value_or(heads);
  check.at_least("kv_heads", 1, kv_heads);
  if (heads % kv_heads != 0) check.fail(text({"kv_heads that divide heads ", heads}), kv_heads);

  check_weight(check, "query weight", w.query, "query bias", w.query_bias, x.extent(2), out);
  check_weight(check, "value weight", w.value, "value bias", w.value_bias, y.extent(2), out);
  const index dim = head_dim(check, "query weight", w.query.extent(0), heads);
  const index dim_v = head_dim(check, "value weight", w.value.extent(0), kv_heads);
  if (w.key) {
    check_weight(check, "key weight", w.key, "key bias", w.key_bias, y.extent(2), out);
    check.equal("key weight rows = kv_heads x query head dim", kv_heads * dim, w.key.extent(0));
  } else {
    if (w.key_bias) check.fail("key bias with a key weight", "no key weight");
    check.equal("kv_heads = heads where queries serve as keys:", heads, kv_heads);
    check.equal("y length = x length where queries serve as keys:", x.extent(1), y.extent(1));
  }
  if (w.output)
    check_weight(check, "output weight", w.output, "output bias", w.output_bias, heads * dim_v, out);
  else if (w.output_bias)
    check.fail("output bias with an output weight", "no output weight");
  check_sequences(check, x, out, w.output ? w.output.extent(0) : heads * dim_v);
  check.no_alias("out", out, "x", x);
  check.no_alias("out", out, "y", y);
  check.fits("y batch * length", {y.extent(0), y.extent(1)});
  check.fits("x batch * length * heads * dims", {x.extent(0), x.extent(1), heads, dim + dim_v});
  check.fits("y batch * length * heads * dims", {y.extent(0), y.extent(1), kv_heads, dim + dim_v});
  return {x.extent(0), x.extent(1), y.extent(1), heads, kv_heads, dim, dim_v};
}

template <class S, class Operator>
void run_multi_head(const tensor_view<const S, 3>& x, const tensor_view<const S, 3>& y, const tensor_view<S, 3>& out,
                    const multi_head_weights<S>& w, const multi_head_shape& s, Operator& op, execution& exec) {
  struct projected {
    tensor_view<S, 3> q, k, v, mixed;
  };
  const auto held = exec.workspace([&](arena& memory) {
    const auto take = [&](index length, index numbers) {
      return tensor_view<S, 3>(memory.allocate<S>(s.batch * length * numbers), {s.batch, length, numbers});
    };
    projected p;
    p.q = take(s.queries, s.heads * s.dim);
    p.k = w.key ? take(s.keys, s.kv_heads * s.dim) : p.q;
    p.v = take(s.keys, s.kv_heads * s.dim_v);
    p.mixed = w.output ? take(s.queries, s.heads * s.dim_v) : out;
    return p;
  });
  const token_projection<S> list[] = {
      {w.query, w.query_bias, held->q}, {w.value, w.value_bias, held->v}, {w.key, w.key_bias, held->k}};
  const std::span all(list, w.key ? 3 : 2);
  if (x.data() == y.data() && x.extents() == y.extents() && x.strides() == y.strides()) {
    run_projections<S>(x, all, exec);
  } else {
    run_projections<S>(x, all.first(1), exec);
    run_projections<S>(y, all.subspan(1), exec);
  }
  op(tensor_view<const S>(split_heads(held->q, s.heads)), tensor_view<const S>(split_heads(held->k, s.kv_heads)),
     tensor_view<const S>(split_heads(held->v, s.kv_heads)), split_heads(held->mixed, s.heads), exec);
  if (!w.output) return;
  const token_projection<S> last{w.output, w.output_bias, out};
  run_projections<S>(held->mixed, {&last, 1}, exec);
}

}  // namespace detail

/// Attention of x to y over heads, by an execution, which may be left out. See the top of the file.
template <detail::is_viewable X, detail::is_viewable Y, detail::is_viewable O, class Operator>
  requires(!detail::is_viewable<Operator>)
void multi_head(const X& x, const Y& y, O&& out, const multi_head_weights<element_of<const X&>>& weights, Operator&& op,
                const multi_head_options& options, execution& exec) {
  detail::require_sequences<const X&, O>();
  using S = element_of<const X&>;
  static_assert(std::same_as<element_of<const Y&>, S>, "attn: x and y must have one element type");
  static_assert(attention_function<std::remove_reference_t<Operator>, S>,
                "attn: the operator must be callable as op(q, k, v, out, execution)");
  const tensor_view<const S, 3> queries = as_sequence(x), keys = as_sequence(y);
  const tensor_view<S, 3> to = as_sequence(out);
  const detail::multi_head_shape shape = detail::check_multi_head<S>(queries, keys, to, weights, options);
  detail::run_multi_head<S>(queries, keys, to, weights, shape, op, exec);
}

template <detail::is_viewable X, detail::is_viewable Y, detail::is_viewable O, class Operator>
  requires(!detail::is_viewable<Operator>)
void multi_head(const X& x, const Y& y, O&& out, const multi_head_weights<element_of<const X&>>& weights, Operator&& op,
                const multi_head_options& options) {
  execution serial;
  multi_head(x, y, out, weights, op, options, serial);
}

/// Self-attention.
template <detail::is_viewable X, detail::is_viewable O, class Operator>
  requires(!detail::is_viewable<Operator>)
void multi_head(const X& x, O&& out, const multi_head_weights<element_of<const X&>>& weights, Operator&& op,
                const multi_head_options& options, execution& exec) {
  multi_head(x, x, out, weights, op, options, exec);
}

template <detail::is_viewable X, detail::is_viewable O, class Operator>
  requires(!detail::is_viewable<Operator>)
void multi_head(const X& x, O&& out, const multi_head_weights<element_of<const X&>>& weights, Operator&& op,
                const multi_head_options& options) {
  execution serial;
  multi_head(x, x, out, weights, op, options, serial);
}

}  // namespace attn
