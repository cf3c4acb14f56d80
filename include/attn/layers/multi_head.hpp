// attn: multi-head attention over any operator.
//
//   q = x W_q^T, k = y W_k^T, v = y W_v^T, out = concat over heads of op(q, k, v) W_o^T       Vaswani et al. 2017
//
//   const auto attend = [](auto q, auto k, auto v, auto out, attn::execution& exec) {
//     attn::full_softmax(q, k, v, out, {.causal = true}, exec);
//   };
//   attn::multi_head(x, out, {.query = wq, .key = wk, .value = wv, .output = wo}, attend, {.heads = 8}, threads);
//   attn::multi_head(x, out, weights, attend, {.heads = 8, .kv_heads = 2, .context = y});   // cross attention
//
// Shapes   x [B, Lq, n], y [B, Lk, m] (x itself unless a context is given), query [heads D, n], key [kv_heads D, m],
//          value [kv_heads Dv, m], output [p, heads Dv], out [B, Lq, p]; biases [rows of their weight]. Head dims follow
//          from the weights' rows. float, double, or Eigen::half / Eigen::bfloat16 in memory with float arithmetic.
//          Without key weights the queries serve as keys (Reformer's shared queries and keys); without output weights
//          out is the concatenation of the heads.
// Operator op(q, k, v, out, execution) is called once, with views [B, heads, L, dim] of what was projected: of memory
//          [B, L, heads, dim], so nothing is moved between projections and operator. True lengths, masks and all else
//          are the operator's own options. What lies in padding stays in its row.
// Cost     2 operations per number of x and y and weight row, and the operator. Scratch, beside the operator's: q, k, v
//          and the heads' output, and what project.hpp needs for the weights.
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

/// Options of multi_head for elements of type S.
template <class S>
struct multi_head_options {
  static_assert(element<S>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");
  index heads = 1;
  /// Heads of keys and values; as many as `heads` unless given, and a divisor of it (grouped queries).
  std::optional<index> kv_heads{};
  /// The sequence y that keys and values are projected from, [B, Lk, m]; x unless given.
  tensor_view<const S, 3> context{};
};

namespace detail {

/// An attention operator with its options bound: op(q, k, v, out, execution).
template <class F, class S>
concept attention_operator = std::invocable < F&,
        const tensor_view<const S>
&, const tensor_view<const S>&, const tensor_view<const S>&, const tensor_view<S>&, execution& > ;

/// The head dim of a weight whose rows are `heads` heads.
inline index head_dim(const validator& check, const char* what, index rows, index heads) {
  if (rows % heads != 0) check.fail(text({what, " rows divisible by heads ", heads}), rows);
  return rows / heads;
}

struct multi_head_shape {
  index batch, queries, keys, heads, kv_heads, dim, dim_v;
};

/// Checks a call; y is the context, or x.
template <class S>
multi_head_shape check_multi_head(const tensor_view<const S, 3>& x, const tensor_view<const S, 3>& y,
                                  const tensor_view<S, 3>& out, const multi_head_weights<S>& w,
                                  const multi_head_options<S>& options) {
  const validator check("multi_head");
  check.memory({{"out", out}}, {{"x", x},
                                {"context", y},
                                {"query weight", w.query},
                                {"query bias", w.query_bias},
                                {"key weight", w.key},
                                {"key bias", w.key_bias},
                                {"value weight", w.value},
                                {"value bias", w.value_bias},
                                {"output weight", w.output},
                                {"output bias", w.output_bias}});
  check.equal("context batch = x batch", x.extent(0), y.extent(0));
  check.at_least("heads", 1, options.heads);
  const index heads = options.heads, kv_heads = options.kv_heads.value_or(heads);
  check.at_least("kv_heads", 1, kv_heads);
  if (heads % kv_heads != 0) check.fail(text({"kv_heads that divide heads ", heads}), kv_heads);

  check_weight(check, "query weight columns = dim of its input", w.query,
               "query bias, one per row of its weight:", w.query_bias, x.extent(2));
  check_weight(check, "value weight columns = dim of its input", w.value,
               "value bias, one per row of its weight:", w.value_bias, y.extent(2));
  const index dim = head_dim(check, "query weight", w.query.extent(0), heads);
  const index dim_v = head_dim(check, "value weight", w.value.extent(0), kv_heads);
  if (w.key) {
    check_weight(check, "key weight columns = dim of its input", w.key,
                 "key bias, one per row of its weight:", w.key_bias, y.extent(2));
    check.equal("key weight rows = kv_heads x query head dim", kv_heads * dim, w.key.extent(0));
  } else {
    if (w.key_bias) check.fail("key bias with a key weight", "no key weight");
    check.equal("kv_heads = heads where queries serve as keys:", heads, kv_heads);
    check.equal("context length = x length where queries serve as keys:", x.extent(1), y.extent(1));
  }
  if (w.output)
    check_weight(check, "output weight columns = dim of its input", w.output,
                 "output bias, one per row of its weight:", w.output_bias, heads * dim_v);
  else if (w.output_bias)
    check.fail("output bias with an output weight", "no output weight");
  check_extents(check, x, out, w.output ? w.output.extent(0) : heads * dim_v);
  check.fits("context batch * length", {y.extent(0), y.extent(1)});
  check.fits("x batch * length * heads * dims", {x.extent(0), x.extent(1), heads, dim + dim_v});
  check.fits("context batch * length * heads * dims", {y.extent(0), y.extent(1), kv_heads, dim + dim_v});
  return {.batch = x.extent(0),
          .queries = x.extent(1),
          .keys = y.extent(1),
          .heads = heads,
          .kv_heads = kv_heads,
          .dim = dim,
          .dim_v = dim_v};
}

template <class S, class Operator>
void run_multi_head(const tensor_view<const S, 3>& x, const tensor_view<const S, 3>& y, const tensor_view<S, 3>& out,
                    const multi_head_weights<S>& w, const multi_head_shape& s, Operator& op, execution& exec) {
  using T = compute_type<S>;
  struct projected {
    tensor_view<S, 3> q, k, v, attended;
  };
  const auto workspace = exec.workspace([&](arena& memory) {
    const auto sequence = [&](index length, index numbers) {
      return tensor_view<S, 3>(memory.allocate<S>(s.batch * length * numbers), {s.batch, length, numbers});
    };
    projected p;
    p.q = sequence(s.queries, s.heads * s.dim);
    p.k = w.key ? sequence(s.keys, s.kv_heads * s.dim) : p.q;
    p.v = sequence(s.keys, s.kv_heads * s.dim_v);
    p.attended = w.output ? sequence(s.queries, s.heads * s.dim_v) : out;
    return p;
  });
  const auto& [q, k, v, attended] = *workspace;
  const projection<T> list[] = {{{w.query, w.query_bias}, output_tokens<T>(q)},
                                {{w.value, w.value_bias}, output_tokens<T>(v)},
                                {{w.key, w.key_bias}, output_tokens<T>(k)}};
  const std::span all(list, w.key ? 3 : 2);
  const input_tokens<T> from(x), context(y);
  if (x.data() == y.data() && x.extents() == y.extents() && x.strides() == y.strides()) {
    run_projections<T>(from, all, exec);
  } else {
    run_projections<T>(from, all.first(1), exec);
    run_projections<T>(context, all.subspan(1), exec);
  }
  op(tensor_view<const S>(split_heads(q, s.heads)), tensor_view<const S>(split_heads(k, s.kv_heads)),
     tensor_view<const S>(split_heads(v, s.kv_heads)), split_heads(attended, s.heads), exec);
  if (!w.output) return;
  const projection<T> last{{w.output, w.output_bias}, output_tokens<T>(out)};
  run_projections<T>(input_tokens<T>(attended), {&last, 1}, exec);
}

}  // namespace detail

/// Attention of x to itself or to a context. See the top of the file.
template <viewable X, viewable O, class Operator, class Weights = multi_head_weights<element_of<const X&>>,
          class Options = multi_head_options<element_of<const X&>>>
void multi_head(const X& x, O&& out, const Weights& weights, Operator&& op, Options&& options = {},
                execution_ref exec = {}) {
  detail::require_sequences<const X&, O>();
  using S = element_of<const X&>;
  static_assert(detail::attention_operator<std::remove_reference_t<Operator>, S>,
                "attn: the operator must be callable as op(q, k, v, out, execution)");
  const tensor_view<const S, 3> from = detail::as_sequence(x);
  const tensor_view<S, 3> to = detail::as_sequence(out);
  const auto& w = detail::weights_of<multi_head_weights<S>>(weights);
  const auto& given = detail::options_or_default<multi_head_options<S>>(options);
  const tensor_view<const S, 3> context = given.context ? given.context : from;
  const detail::multi_head_shape shape = detail::check_multi_head<S>(from, context, to, w, given);
  detail::run_multi_head<S>(from, context, to, w, shape, op, detail::execution_of(exec, options));
}

}  // namespace attn::inline ATTN_ISA
