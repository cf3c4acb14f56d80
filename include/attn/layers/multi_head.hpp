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
//   attn::multi_head(x, out, {.query = wq, .output = wo},                                    // keys projected before
//                    [&](auto q, auto to, auto& exec) { attn::full_softmax(q, k, v, to, exec); }, {.heads = 8});
//   attn::multi_head(x, out, weights, attend, {.heads = 8, .rotary = {{.first_position = cache.tokens()}}});
//
// Shapes   x [B, Lq, n], y [B, Lk, m] (x itself unless a context is given), query [heads D, n], key [kv_heads D, m],
//          value [kv_heads Dv, m], output [p, heads Dv], gate [heads Dv, n], out [B, Lq, p]; biases [rows of their
//          weight]. Head dims follow from the weights' rows. float, double, or Eigen::half / Eigen::bfloat16 in memory
//          with float sums. q_norm [D] or [heads D], k_norm [D] or [kv_heads D].
// Weights  that a model does not have are left out. Without output weights out is the concatenation of the heads.
//          Without value weights y itself is the values, m = kv_heads Dv (He & Hofmann 2023). Without key weights the
//          queries serve as keys (Reformer's shared queries and keys), normed and rotated once. Without key and value
//          weights the operator has its own, a cache or what was projected from a context once: it is called as
//          op(q, out, execution), or as below with null views for k and v; Dv follows from the output weight, the gate
//          or out, and there is no context.
// Operator op(q, k, v, out, execution) is called once, with views [B, heads, L, dim] of what was projected: of memory
//          [B, L, heads, dim], so nothing is copied between projections and operator. Give true lengths, masks and all
//          else to the operator as its options. Values in padding affect only their own row.
// Cost     2 operations per number of x and y and weight row, and the operator. Scratch, beside the operator's: q, k, v
//          and the heads' output, and what project.hpp needs for the weights.
// Throws   std::invalid_argument for shapes that do not fit, before anything is written; exceptions of the operator are
//          passed on.
#pragma once

#include <attn/layers/detail/multi_head_run.hpp>

#include <optional>

namespace attn { inline namespace ATTN_ISA {

/// Weights of multi_head: one row for every projected number.
template <class S>
struct multi_head_weights {
  weight_field<S> query{}, key{}, value{}, output{}, gate{};
  view_field<const S, 1> query_bias{}, key_bias{}, value_bias{}, output_bias{}, gate_bias{};
  view_field<const S, 1> q_norm{}, k_norm{};
};

template <class S>
struct multi_head_options {
  idx_t heads = 1;
  /// Heads of keys and values; as many as `heads` unless given, and a divisor of it (grouped queries).
  std::optional<idx_t> kv_heads{};
  /// The sequence y that keys and values are projected from, [B, Lk, m]; x unless given.
  view_field<const S, 3> context{};
  attn::gate_activation gate_activation = attn::gate_activation::sigmoid;  // f, where there is a gate weight
  /// Written if given, where there is an output or a gate weight: the heads' output, [B, Lq, heads Dv], before the
  /// gate. multi_head_backward reads it; without it, it calls the operator once more.
  view_field<S, 3> attended{};
  /// Of q_norm and k_norm.
  compute_type<S> norm_eps = compute_type<S>(1e-6);
  /// Rotates q and k, after their norms. Keys of a context are at positions of their own, from the first one on.
  std::optional<rotary_options<S>> rotary{};
};

template <viewable X, viewable O, class Operator, class Weights = multi_head_weights<element_of<const X&>>,
          class Options = multi_head_options<element_of<const X&>>>
void multi_head(const X& x, O&& out, const Weights& weights, Operator&& op, Options&& options = {},
                execution_ref exec = {}) {
  using S = element_of<const X&>;
  const auto [from, to] = detail::sequences_of(x, out);
  const auto& w = detail::weights_of<multi_head_weights<S>>(weights);
  const auto& given = detail::options_or_default<multi_head_options<S>>(options);
  detail::call_multi_head<S>(from, to, w, given, detail::attend_of<S>("multi_head", op, w),
                             detail::execution_of(exec, options));
}

}}  // namespace attn::ATTN_ISA

#define ATTN_RUN(S) void call_multi_head<S>(const tensor_view<const S, 3>&, const tensor_view<S, 3>&,                  \
  const multi_head_weights<S>&, const multi_head_options<S>&, const attend_ref<S>&, execution&)
#include <attn/core/detail/compiled.hpp>
