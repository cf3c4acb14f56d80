// attn: multi-head attention over any operator.
//
//   q = x W_q^T, k = y W_k^T, v = y W_v^T, out = concat over heads of op(q, k, v) W_o^T       Vaswani et al. 2017
//   with a gate, out = (concat over heads of op(q, k, v) * f(x W_g^T)) W_o^T, f sigmoid (Qwen's gated attention) or
//   SiLU
//                                                                   Qiu et al. 2025; Hua et al. 2022 (GAU), f = SiLU
//
//   with q_norm and k_norm, q and k are divided by the root of the mean of their squares + eps and multiplied by these,
//   per head or over all heads (Qwen3, Gemma 3; OLMo 2); with .rotary they are rotated then (rotary.hpp)
//
//   const auto attend = [](auto q, auto k, auto v, auto out, attn::execution& exec) {
//     attn::full_softmax(q, k, v, out, {.causal = true}, exec);
//   };
//   attn::multi_head(x, out, {.query = wq, .key = wk, .value = wv, .output = wo}, attend, {.heads = 8}, threads);
//   attn::multi_head(x, out, weights, attend, {.heads = 8, .kv_heads = 2, .context = y});   // cross attention
//   attn::multi_head(x, out, weights, attend, {.heads = 8, .rotary = {{.first_position = cache.tokens()}}});
//
// Shapes   x [B, Lq, n], y [B, Lk, m] (x itself unless a context is given), query [heads D, n], key [kv_heads D, m],
//          value [kv_heads Dv, m], output [p, heads Dv], gate [heads Dv, n], out [B, Lq, p]; biases [rows of their
//          weight]. Head dims follow from the weights' rows. float, double, or Eigen::half / Eigen::bfloat16 in memory
//          with float sums. q_norm [D] or [heads D], k_norm [D] or [kv_heads D]. Without key weights the queries serve
//          as keys (Reformer's shared queries and keys), normed and rotated once; without output weights out is the
//          concatenation of the heads.
// Operator op(q, k, v, out, execution) is called once, with views [B, heads, L, dim] of what was projected: of memory
//          [B, L, heads, dim], so nothing is copied between projections and operator. Give true lengths, masks and all
//          else to the operator as its options. Values in padding affect only their own row.
// Cost     2 operations per number of x and y and weight row, and the operator. Scratch, beside the operator's: q, k, v
//          and the heads' output, and what project.hpp needs for the weights.
// Throws   std::invalid_argument for shapes that do not fit, before anything is written; exceptions of the operator are
//          passed on.
#pragma once

#include <attn/layers/detail/head_norms.hpp>
#include <attn/layers/detail/output_gate.hpp>
#include <attn/layers/project.hpp>

#include <optional>

namespace attn { inline namespace ATTN_ISA {

/// Weights of multi_head: one row for every projected number.
template <class S>
struct multi_head_weights {
  weight_field<S> query{}, key{}, value{}, output{}, gate{};
  view_field<const S, 1> query_bias{}, key_bias{}, value_bias{}, output_bias{}, gate_bias{};
  view_field<const S, 1> q_norm{}, k_norm{};
};

/// Options of multi_head for elements of type S.
template <class S>
struct multi_head_options {
  idx_t heads = 1;
  /// Heads of keys and values; as many as `heads` unless given, and a divisor of it (grouped queries).
  std::optional<idx_t> kv_heads{};
  /// The sequence y that keys and values are projected from, [B, Lk, m]; x unless given.
  view_field<const S, 3> context{};
  /// f, where there is a gate weight.
  attn::gate_activation gate_activation = attn::gate_activation::sigmoid;
  /// Written if given, where there is an output or a gate weight: the heads' output, [B, Lq, heads Dv], before the
  /// gate. multi_head_backward reads it; without it, it calls the operator once more.
  view_field<S, 3> attended{};
  /// Of q_norm and k_norm.
  compute_type<S> norm_eps = compute_type<S>(1e-6);
  /// Rotates q and k, after their norms. Keys of a context are at positions of their own, from the first one on.
  std::optional<rotary_options<S>> rotary{};
};

namespace detail {

template <class S>
void check_attended(layer_views& check, const multi_head_weights<S>& w, const tensor_view<S, 3>& attended, idx_t dim) {
  check.extents({{"attended batch = x batch", check.x.extents[0], attended.extent(0)},
                 {"attended length = x length", check.x.extents[1], attended.extent(1)},
                 {"attended dim", dim, attended.extent(2)}});
  if (check.backward) return check.read("attended", attended);
  if (!w.output && !w.gate) check.fail("attended with an output weight: without one it is out", "no output weight");
  check.update("attended", attended);
}

/// Checks a call; y is the context, or x.
template <class S>
void check_multi_head(layer_views& check, const tensor_view<const S, 3>& y, const multi_head_weights<S>& w,
                      const multi_head_options<S>& options) {
  const idx_t* const x = check.x.extents;
  check.read("context", y);
  check.equal("context batch = x batch", x[0], y.extent(0));
  check.at_least("heads", 1, options.heads);
  const idx_t heads = options.heads, kv_heads = options.kv_heads.value_or(heads);
  check.at_least("kv_heads", 1, kv_heads);
  if (heads % kv_heads != 0) check.fail({"kv_heads that divide heads ", heads}, kv_heads);

  const auto head_dim = [&](const char* what, idx_t rows, idx_t count) {
    if (rows % count != 0) check.fail({what, " rows divisible by heads ", count}, rows);
    return rows / count;
  };
  check.linear("query weight", w.query, "query bias", w.query_bias, x[2]);
  check.linear("value weight", w.value, "value bias", w.value_bias, y.extent(2));
  const idx_t dim = head_dim("query weight", w.query.extent(0), heads);
  const idx_t dim_v = head_dim("value weight", w.value.extent(0), kv_heads);
  if (w.key) {
    check.linear("key weight", w.key, "key bias", w.key_bias, y.extent(2));
    check.equal("key weight rows = kv_heads x query head dim", kv_heads * dim, w.key.extent(0));
  } else {
    if (w.key_bias) check.fail("key bias with a key weight", "no key weight");
    check.equal("kv_heads = heads where queries serve as keys:", heads, kv_heads);
    check.equal("context length = x length where queries serve as keys:", x[1], y.extent(1));
  }
  if (w.output)
    check.linear("output weight", w.output, "output bias", w.output_bias, heads * dim_v);
  else if (w.output_bias)
    check.fail("output bias with an output weight", "no output weight");
  if (w.gate) {
    check.linear("gate weight", w.gate, "gate bias", w.gate_bias, x[2]);
    check.equal("gate weight rows = heads x value head dim", heads * dim_v, w.gate.extent(0));
  } else if (w.gate_bias) {
    check.fail("gate bias with a gate weight", "no gate weight");
  }
  check_norm_of_heads<S>(check, "q_norm", w.q_norm, heads, dim);
  check_norm_of_heads<S>(check, "k_norm", w.k_norm, kv_heads, dim);
  if (w.k_norm && !w.key) check.fail("k_norm with a key weight", "no key weight");
  if (!(options.norm_eps >= 0)) check.fail("norm_eps >= 0", static_cast<double>(options.norm_eps));
  check.out_dim(w.output ? w.output.extent(0) : heads * dim_v, w.output ? " = output weight rows" : "");
  if (options.attended) check_attended(check, w, options.attended, heads * dim_v);
  check.fits("context batch * length", {y.extent(0), y.extent(1)});
  check.fits("x batch * length * heads * dims", {x[0], x[1], heads, dim + dim_v});
  check.fits("context batch * length * heads * dims", {y.extent(0), y.extent(1), kv_heads, dim + dim_v});
  if (!options.rotary) return;
  check_rotary(check, tensor_view<const S>(nullptr, {x[0], heads, x[1], dim}), *options.rotary);
  check_rotary(check, tensor_view<const S>(nullptr, {x[0], kv_heads, y.extent(1), dim}), *options.rotary);
}

/// The operator: multi_head is compiled once for an element type, not for every operator.
template <class S>
using attend_ref = function_ref<void(const tensor_view<const S>& q, const tensor_view<const S>& k,
                                     const tensor_view<const S>& v, const tensor_view<S>& out, execution&)>;

/// What the heads have in memory.
template <class S>
struct projected_heads {
  tensor_view<S, 3> q{}, k{}, v{}, gate{};  // without key weights k is q
};

/// q, k, v and the gate before its activation.
template <class S>
void project_heads(const tensor_view<const S, 3>& x, const tensor_view<const S, 3>& y, const multi_head_weights<S>& w,
                   const projected_heads<S>& to, execution& exec) {
  with_products<S>(exec, [&]<class P>(std::type_identity<P>) {
    const projection<P> query{{w.query, w.query_bias}, to.q}, gate{{w.gate, w.gate_bias}, to.gate},
        value{{w.value, w.value_bias}, to.v}, key{{w.key, w.key_bias}, to.k};
    const projection<P> list[] = {query, w.gate ? gate : value, w.gate ? value : key, key};
    const idx_t of_x = w.gate ? 2 : 1, count = of_x + (w.key ? 2 : 1);
    const std::span all(list, static_cast<std::size_t>(count));
    if (x.data() == y.data() && x.extents() == y.extents() && x.strides() == y.strides()) {
      run_projections<P>(x, all, exec);
    } else {
      run_projections<P>(x, all.first(static_cast<std::size_t>(of_x)), exec);
      run_projections<P>(y, all.subspan(static_cast<std::size_t>(of_x)), exec);
    }
  });
}

/// Norms and rotations of the queries and keys in `from`, which may be `to`.
template <class S>
void prepare_heads(const projected_heads<S>& from, const projected_heads<S>& to, const multi_head_weights<S>& w,
                   const multi_head_options<S>& options, execution& exec) {
  if (w.q_norm) normalise_heads<S>(from.q, to.q, w.q_norm, options.norm_eps, exec);
  if (w.k_norm) normalise_heads<S>(from.k, to.k, w.k_norm, options.norm_eps, exec);
  if (!options.rotary) return;
  rotate_heads<S>(to.q, options.heads, *options.rotary, false, exec);
  if (w.key) rotate_heads<S>(to.k, options.kv_heads.value_or(options.heads), *options.rotary, false, exec);
}

template <class S>
void run_multi_head(const tensor_view<const S, 3>& x, const tensor_view<const S, 3>& y, const tensor_view<S, 3>& out,
                    const multi_head_weights<S>& w, const multi_head_options<S>& options, const attend_ref<S>& op,
                    execution& exec) {
  const idx_t heads = options.heads, kv_heads = options.kv_heads.value_or(heads);
  struct buffers {
    projected_heads<S> heads;
    tensor_view<S, 3> attended;
  };
  const auto workspace = exec.workspace([&](arena& memory) {
    const auto allocate = [&](const tensor_view<const S, 3>& from, idx_t dim) {
      return allocate_sequence<S>(memory, from.extent(0), from.extent(1), dim);
    };
    projected_heads<S> p;
    p.q = allocate(x, w.query.extent(0));
    p.k = w.key ? allocate(y, w.key.extent(0)) : p.q;
    p.v = allocate(y, w.value.extent(0));
    if (w.gate) p.gate = allocate(x, w.gate.extent(0));
    return buffers{p, !w.output && !w.gate ? out
                      : options.attended   ? tensor_view<S, 3>(options.attended)
                                           : allocate(x, heads * (w.value.extent(0) / kv_heads))};
  });
  const auto& [projected, attended] = *workspace;
  const auto& [q, k, v, gate] = projected;
  project_heads<S>(x, y, w, projected, exec);
  prepare_heads<S>(projected, projected, w, options, exec);
  op(split_heads(q, heads), split_heads(k, kv_heads), split_heads(v, kv_heads), split_heads(attended, heads), exec);
  const tensor_view<S, 3> gated = !w.gate ? attended : w.output ? gate : out;
  if (w.gate) apply_gate<S>(attended, gate, options.gate_activation, gated, exec);
  if (!w.output) return;
  run_project<S>(gated, out, {w.output, w.output_bias}, exec);
}

template <class S>
[[gnu::noinline]] void call_multi_head(const tensor_view<const S, 3>& x, const tensor_view<S, 3>& out,
                                       const multi_head_weights<S>& w, const multi_head_options<S>& options,
                                       const attend_ref<S>& op, execution& exec) {
  const auto& context = options.context ? options.context : x;
  layer_views check{"multi_head", x, out, false};
  check_multi_head<S>(check, context, w, options);
  run_multi_head<S>(x, context, out, w, options, op, exec);
}

}  // namespace detail

/// Attention of x to itself or to a context. See the top of the file.
template <viewable X, viewable O, class Operator, class Weights = multi_head_weights<element_of<const X&>>,
          class Options = multi_head_options<element_of<const X&>>>
void multi_head(const X& x, O&& out, const Weights& weights, Operator&& op, Options&& options = {},
                execution_ref exec = {}) {
  using S = element_of<const X&>;
  using view = tensor_view<const S>;
  static_assert(std::invocable<Operator&, view, view, view, tensor_view<S>, execution&>,
                "attn: the operator must be callable as op(q, k, v, out, execution)");
  const auto [from, to] = detail::sequences_of(x, out);
  const auto& w = detail::weights_of<multi_head_weights<S>>(weights);
  const auto& given = detail::options_or_default<multi_head_options<S>>(options);
  const auto attend = [&op](const view& q, const view& k, const view& v, const tensor_view<S>& heads, execution& e) {
    op(view(q), view(k), view(v), tensor_view<S>(heads), e);
  };
  detail::call_multi_head<S>(from, to, w, given, attend, detail::execution_of(exec, options));
}

}}  // namespace attn::ATTN_ISA

#define ATTN_RUN(S) void call_multi_head<S>(const tensor_view<const S, 3>&, const tensor_view<S, 3>&,                  \
  const multi_head_weights<S>&, const multi_head_options<S>&, const attend_ref<S>&, execution&)
#include <attn/core/detail/compiled.hpp>
