// attn: the gradients of multi_head, around any operator that has a backward pass.
//
//   d_heads = d_out W_o,   (dq, dk, dv) = op_backward(d_heads),   dx = dq W_q,   dy = dk W_k + dv W_v,
//   dW_q = sum over tokens of dq^T x, and so on;  dx is the sum of all three where y is x
//   through a rotation and a norm of q or k, where there are, as in rotary_backward and rms_norm_backward
//   with a gate g: d_gated = d_out W_o, d_heads = d_gated * f(g), dg = d_gated * heads * f'(g), dx gets dg W_g too
//
//   const auto attend = [&](auto q, auto k, auto v, auto out, attn::execution& exec) {
//     attn::full_softmax(q, k, v, out, {.causal = true, .lse = lse}, exec);              // lse: one buffer for both
//   };
//   const auto attend_backward = [&](auto q, auto k, auto v, auto out, auto d_out, auto dq, auto dk, auto dv,
//                                    attn::execution& exec) {
//     attn::full_softmax_backward(q, k, v, out, d_out, {dq, dk, dv}, {.causal = true, .lse = lse}, exec);
//   };
//   attn::multi_head(x, out, weights, attend, {.heads = 8});
//   attn::multi_head_backward(x, weights, attend, attend_backward, d_out, {.x = dx, .query = dwq}, {.heads = 8});
//
// Shapes   x, weights and options as the forward call's, d_out as its out, which is not needed; gradients have the
//          shapes of what they are of. A context is a separate input, even where it is x: its gradient is .context.
//          float, double, or Eigen::half / Eigen::bfloat16 in memory with float sums.
// Operator q, k, v are projected again, and op(q, k, v, out, execution) is called once more: an lse that it writes is
//          then that of this layer, whatever other layers wrote there. With options.attended, which the forward call
//          wrote, it is not called, and lse must be kept as well; without an output and a gate weight the forward
//          call's out serves as attended. Then op_backward(q, k, v, out, d_out, dq, dk, dv, execution) writes dq, dk
//          and dv over, with views [B, heads, L, dim] as in the forward call.
// Cost     three times that of the forward call for the projections of q, k and v, twice for that of the output, and
//          the operator (without options.attended) and its backward pass. Scratch, beside the operator's: q, k, v, the
//          heads' output and the gradients of these, twice what the forward call needs, and what project_backward.hpp
//          needs.
// Throws   std::invalid_argument for shapes that do not fit, and for gradients of what was not given or that share
//          memory with an input or one another, before anything is written; exceptions of the operator are passed on.
//
// Sums over the tokens of all batch items are split at fixed places: any number of threads gives the same bits. Tokens
// whose dq, dk and dv are 0, as an operator with true lengths leaves them in padding, have gradient 0 and add nothing,
// whatever their x is.
#pragma once

#include <attn/layers/detail/head_norms_backward.hpp>
#include <attn/layers/multi_head.hpp>
#include <attn/layers/project_backward.hpp>

namespace attn { inline namespace ATTN_ISA {

/// The gradients multi_head_backward writes: those given. S is the element type of the call.
template <class S>
struct multi_head_gradients {
  view_field<S, 3> x{}, context{};
  view_field<S, 2> query{}, key{}, value{}, output{}, gate{};
  view_field<S, 1> query_bias{}, key_bias{}, value_bias{}, output_bias{}, gate_bias{}, q_norm{}, k_norm{};
  /// Add to what is there, instead of writing it over.
  bool accumulate = false;
};

namespace detail {

template <class S>
using attend_backward_ref =
    function_ref<void(const tensor_view<const S>& q, const tensor_view<const S>& k, const tensor_view<const S>& v,
                      const tensor_view<const S>& out, const tensor_view<const S>& d_out, const tensor_view<S>& dq,
                      const tensor_view<S>& dk, const tensor_view<S>& dv, execution&)>;

template <class S>
void run_multi_head_backward(const tensor_view<const S, 3>& x, const multi_head_weights<S>& w,
                             const attend_ref<S>& op, const attend_backward_ref<S>& op_backward,
                             const tensor_view<const S, 3>& d_out,
                             const multi_head_gradients<S>& g, const multi_head_options<S>& options, execution& exec) {
  using T = compute_type<S>;
  using P = product_type<S>;
  using view = tensor_view<const S>;
  const auto& y = options.context ? options.context : x;
  const idx_t heads = options.heads, kv_heads = options.kv_heads.value_or(heads);
  struct buffers {
    projected_heads<S> heads;
    tensor_view<S, 3> attended, gated, d_attended, dq, dk, dv;
    projected_heads<S> before_norms;
  };
  const auto workspace = exec.workspace([&](arena& memory) {
    const auto allocate = [&](const tensor_view<const S, 3>& from, idx_t dim) {
      return allocate_sequence<S>(memory, from.extent(0), from.extent(1), dim);
    };
    const idx_t attended_dim = heads * (w.value.extent(0) / kv_heads);
    buffers p;
    p.heads.q = allocate(x, w.query.extent(0));
    p.heads.k = w.key ? allocate(y, w.key.extent(0)) : p.heads.q;
    p.heads.v = allocate(y, w.value.extent(0));
    if (w.gate) p.heads.gate = allocate(x, attended_dim);
    p.attended = options.attended ? tensor_view<S, 3>(options.attended) : allocate(x, attended_dim);
    p.gated = w.gate && w.output ? allocate(x, attended_dim) : p.attended;
    if (w.output || w.gate) p.d_attended = allocate(x, attended_dim);
    p.dq = allocate(x, p.heads.q.extent(2));
    p.dk = allocate(y, p.heads.k.extent(2));
    p.dv = allocate(y, p.heads.v.extent(2));
    p.before_norms = p.heads;
    if (w.q_norm) p.before_norms.q = allocate(x, w.query.extent(0));
    if (w.k_norm) p.before_norms.k = allocate(y, w.key.extent(0));
    return p;
  });
  const auto& [projected, attended, gated, d_attended, dq, dk, dv, before_norms] = *workspace;
  const auto& [q, k, v, gate] = projected;
  const view q_heads = split_heads(q, heads), k_heads = split_heads(k, kv_heads), v_heads = split_heads(v, kv_heads);
  const auto heads_out = split_heads(attended, heads);
  const bool adds = g.accumulate;
  const bool through_operator =
      g.x || g.context || g.query || g.key || g.value || g.query_bias || g.key_bias || g.value_bias || g.q_norm ||
      g.k_norm;
  const bool through_gate = w.gate && (g.x || g.gate || g.gate_bias), below = through_operator || through_gate;

  if (below || w.gate || !options.attended) {
    project_heads<S>(x, y, w, before_norms, exec);
    prepare_heads<S>(before_norms, projected, w, options, exec);
  }
  if (!options.attended) op(q_heads, k_heads, v_heads, heads_out, exec);
  if (w.gate && w.output) apply_gate<S>(attended, gate, options.gate_activation, gated, exec);
  if (w.output) {
    const projection_gradient<P> last(w.output, input_tokens<T>(d_out), g.output, g.output_bias, adds);
    const tensor_view<S, 3> to = below ? d_attended : tensor_view<S, 3>();
    run_projections_backward<P>(gated, {to, false}, {&last, 1}, exec);
  }
  if (!below) return;
  const auto d_gated = w.output ? tensor_view<const S, 3>(d_attended) : d_out;
  if (w.gate) apply_gate_backward<S>(attended, gate, d_gated, options.gate_activation, d_attended, gate, exec);
  if (through_operator) {
    op_backward(q_heads, k_heads, v_heads, view(heads_out),
                view(split_heads(w.output || w.gate ? tensor_view<const S, 3>(d_attended) : d_out, heads)),
                split_heads(dq, heads), split_heads(dk, kv_heads), split_heads(dv, kv_heads), exec);
    if (options.rotary) {
      rotate_heads<S>(dq, heads, *options.rotary, true, exec);
      rotate_heads<S>(dk, kv_heads, *options.rotary, true, exec);
    }
    if (w.q_norm)
      normalise_heads_backward<S>(before_norms.q, w.q_norm, options.norm_eps, dq, w.key ? tensor_view<S, 3>() : dk,
                                  g.q_norm, adds, exec);
    if (w.k_norm)
      normalise_heads_backward<S>(before_norms.k, w.k_norm, options.norm_eps, dk, {}, g.k_norm, adds, exec);
  }

  // Queries that serve as keys take both gradients.
  const token_sum<T> d_queries = w.key || w.q_norm ? token_sum<T>(dq) : token_sum<T>(dq, dk);
  const projection_gradient<P> query{w.query, d_queries, g.query, g.query_bias, adds},
      value{w.value, token_sum<T>(dv), g.value, g.value_bias, adds},
      key{w.key, token_sum<T>(dk), g.key, g.key_bias, adds},
      of_gate{w.gate, w.gate ? token_sum<T>(gate) : token_sum<T>(dq), g.gate, g.gate_bias, adds};
  if (!through_operator) return run_projections_backward<P>(x, {tensor_view<S, 3>(), adds}, {&of_gate, 1}, exec);
  const projection_gradient<P> list[] = {query, w.gate ? of_gate : value, w.gate ? value : key, key};
  const std::size_t of_x = w.gate ? 2 : 1;
  const std::span all(list, of_x + (w.key ? 2 : 1));
  if (!options.context) return run_projections_backward<P>(x, {g.x, adds}, all, exec);
  run_projections_backward<P>(x, {g.x, adds}, all.first(of_x), exec);
  run_projections_backward<P>(y, {g.context, adds}, all.subspan(of_x), exec);
}

/// All checks of multi_head_backward.
template <class S>
void check_multi_head_backward(const tensor_view<const S, 3>& x, const multi_head_weights<S>& w,
                               const tensor_view<const S, 3>& d_out, const multi_head_gradients<S>& g,
                               const multi_head_options<S>& options) {
  layer_views check{"multi_head_backward", x, d_out, layer_views::backward_pass{}};
  check.gradient("x", g.x, x);
  check.gradient("context", g.context, options.context);
  check.gradient("query", g.query, w.query, "query weight");
  check.gradient("key", g.key, w.key, "key weight");
  check.gradient("value", g.value, w.value, "value weight");
  check.gradient("output", g.output, w.output, "output weight");
  check.gradient("gate", g.gate, w.gate, "gate weight");
  check.gradient("gate_bias", g.gate_bias, w.gate_bias, "gate bias");
  check.gradient("query_bias", g.query_bias, w.query_bias, "query bias");
  check.gradient("key_bias", g.key_bias, w.key_bias, "key bias");
  check.gradient("value_bias", g.value_bias, w.value_bias, "value bias");
  check.gradient("output_bias", g.output_bias, w.output_bias, "output bias");
  check.gradient("q_norm", g.q_norm, w.q_norm);
  check.gradient("k_norm", g.k_norm, w.k_norm);
  check_multi_head<S>(check, options.context ? options.context : x, w, options);
}

template <class S>
[[gnu::noinline]] void call_multi_head_backward(const tensor_view<const S, 3>& x, const multi_head_weights<S>& w,
                                                const attend_ref<S>& op, const attend_backward_ref<S>& op_backward,
                                                const tensor_view<const S, 3>& d_out, const multi_head_gradients<S>& g,
                                                const multi_head_options<S>& options, execution& exec) {
  check_multi_head_backward<S>(x, w, d_out, g, options);
  run_multi_head_backward<S>(x, w, op, op_backward, d_out, g, options, exec);
}

}  // namespace detail

/// The gradients of multi_head. See the top of the file.
template <viewable X, class Operator, class OperatorBackward, viewable D,
          class Weights = multi_head_weights<element_of<const X&>>,
          class Options = multi_head_options<element_of<const X&>>>
void multi_head_backward(const X& x, const Weights& weights, Operator&& op, OperatorBackward&& op_backward,
                         const D& d_out, const multi_head_gradients<element_of<const X&>>& gradients,
                         Options&& options = {}, execution_ref exec = {}) {
  using S = element_of<const X&>;
  using view = tensor_view<const S>;
  using out_view = tensor_view<S>;
  static_assert(std::invocable<Operator&, view, view, view, out_view, execution&>,
                "attn: the operator must be callable as op(q, k, v, out, execution)");
  static_assert(
      std::invocable<OperatorBackward&, view, view, view, view, view, out_view, out_view, out_view, execution&>,
      "attn: the operator's gradient must be callable as op_backward(q, k, v, out, d_out, dq, dk, dv, execution)");
  const auto [from, d] = detail::inputs_of(x, d_out);
  const auto& w = detail::weights_of<multi_head_weights<S>>(weights);
  const auto& given = detail::options_or_default<multi_head_options<S>>(options);
  const auto attend = [&op](const view& q, const view& k, const view& v, const out_view& heads, execution& e) {
    op(view(q), view(k), view(v), out_view(heads), e);
  };
  const auto attend_backward = [&op_backward](const view& q, const view& k, const view& v, const view& heads,
                                              const view& d_heads, const out_view& dq, const out_view& dk,
                                              const out_view& dv, execution& e) {
    op_backward(view(q), view(k), view(v), view(heads), view(d_heads), out_view(dq), out_view(dk), out_view(dv), e);
  };
  detail::call_multi_head_backward<S>(from, w, attend, attend_backward, d, gradients, given,
                                      detail::execution_of(exec, options));
}

}}  // namespace attn::ATTN_ISA

#define ATTN_RUN(S) void call_multi_head_backward<S>(const tensor_view<const S, 3>&, const multi_head_weights<S>&,     \
  const attend_ref<S>&, const attend_backward_ref<S>&, const tensor_view<const S, 3>&,                                 \
  const multi_head_gradients<S>&, const multi_head_options<S>&, execution&)
#include <attn/core/detail/compiled.hpp>
