// attn: the checks and the run of multi_head_backward.
#pragma once

#include <attn/layers/detail/head_norms_backward.hpp>
#include <attn/layers/detail/multi_head_run.hpp>
#include <attn/layers/project_backward.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct multi_head_gradients;

namespace detail {

template <class S>
using attend_backward_ref =
    function_ref<void(const tensor_view<const S>& q, const tensor_view<const S>& k, const tensor_view<const S>& v,
                      const tensor_view<const S>& out, const tensor_view<const S>& d_out, const tensor_view<S>& dq,
                      const tensor_view<S>& dk, const tensor_view<S>& dv, execution&)>;

template <class S>
void run_multi_head_backward(const multi_head_call<S>& call, const attend_ref<S>& op,
                             const attend_backward_ref<S>& op_backward, const tensor_view<const S, 3>& d_out,
                             const multi_head_gradients<S>& g, execution& exec) {
  using T = compute_type<S>;
  using P = product_type<S>;
  using view = tensor_view<const S>;
  const auto &x = call.x, &y = call.y;
  const auto& w = call.w;
  const auto& options = call.options;
  struct buffers {
    projected_heads<S> heads, before_norms;
    tensor_view<S, 3> attended, gated, d_attended, dq, dk, dv;
  };
  const auto workspace = exec.workspace([&](arena& memory) {
    const auto allocate = [&](const tensor_view<const S, 3>& from, idx_t dim) {
      return allocate_sequence<S>(memory, from.extent(0), from.extent(1), dim);
    };
    buffers p;
    p.heads = p.before_norms = projected_heads<S>(memory, call);
    p.attended = options.attended ? tensor_view<S, 3>(options.attended) : allocate(x, call.attended_dim());
    p.gated = w.gate && w.output ? allocate(x, call.attended_dim()) : p.attended;
    if (w.output || w.gate) p.d_attended = allocate(x, call.attended_dim());
    p.dq = allocate(x, p.heads.q.extent(2));
    if (call.gives_keys()) p.dk = allocate(y, p.heads.k.extent(2)), p.dv = allocate(y, call.kv_heads * call.dim_v);
    if (w.q_norm) p.before_norms.q = allocate(x, w.query.extent(0));
    if (w.k_norm) p.before_norms.k = allocate(y, w.key.extent(0));
    return p;
  });
  const auto& [projected, before_norms, attended, gated, d_attended, dq, dk, dv] = *workspace;
  const auto& gate = projected.gate;
  const idx_t heads = call.heads, kv_heads = call.kv_heads;
  const view q_heads = projected.queries(call), k_heads = projected.keys(call), v_heads = projected.values(call);
  const auto heads_out = split_heads(attended, heads);
  const bool adds = g.accumulate;
  const bool through_operator =
      g.x || g.context || g.query || g.key || g.value || g.query_bias || g.key_bias || g.value_bias || g.q_norm ||
      g.k_norm;
  const bool through_gate = w.gate && (g.x || g.gate || g.gate_bias), below = through_operator || through_gate;

  if (below || w.gate || !options.attended) {
    project_heads<S>(call, before_norms, exec);
    prepare_heads<S>(call, before_norms, projected, exec);
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
  const bool keys_too = call.queries_are_keys();
  if (through_operator) {
    const auto heads_or_none = [&](const tensor_view<S, 3>& d) {
      return d ? split_heads(d, kv_heads) : tensor_view<S>();
    };
    op_backward(q_heads, k_heads, v_heads, view(heads_out),
                view(split_heads(w.output || w.gate ? tensor_view<const S, 3>(d_attended) : d_out, heads)),
                split_heads(dq, heads), heads_or_none(dk), heads_or_none(dv), exec);
    if (options.rotary) {
      rotate_heads<S>(dq, heads, *options.rotary, true, exec);
      if (call.gives_keys()) rotate_heads<S>(dk, kv_heads, *options.rotary, true, exec);
    }
    if (w.q_norm)
      normalise_heads_backward<S>(before_norms.q, w.q_norm, options.norm_eps, dq, keys_too ? dk : tensor_view<S, 3>(),
                                  g.q_norm, adds, exec);
    if (w.k_norm)
      normalise_heads_backward<S>(before_norms.k, w.k_norm, options.norm_eps, dk, {}, g.k_norm, adds, exec);
  }

  // Queries that serve as keys take both gradients; values that are y itself give theirs to it.
  const token_sum<T> d_queries = keys_too && !w.q_norm ? token_sum<T>(dq, dk) : token_sum<T>(dq);
  const projection_gradient<P> query{w.query, d_queries, g.query, g.query_bias, adds},
      value{w.value, token_sum<T>(dv), g.value, g.value_bias, adds},
      key{w.key, token_sum<T>(dk), g.key, g.key_bias, adds},
      of_gate{w.gate, w.gate ? token_sum<T>(gate) : token_sum<T>(dq), g.gate, g.gate_bias, adds};
  if (!through_operator) return run_projections_backward<P>(x, {tensor_view<S, 3>(), adds}, {&of_gate, 1}, exec);
  const projection_gradient<P> list[] = {query, w.gate ? of_gate : w.value ? value : key,
                                         w.gate && w.value ? value : key, key};
  const std::size_t of_x = w.gate ? 2 : 1, of_y = (w.value ? 1 : 0) + (w.key ? 1 : 0);
  const std::span all(list, of_x + of_y);
  const input_tokens<T> direct = w.value ? tensor_view<const S, 3>() : tensor_view<const S, 3>(dv);
  if (!options.context) return run_projections_backward<P>(x, {g.x, adds}, all, exec, direct);
  run_projections_backward<P>(x, {g.x, adds}, all.first(of_x), exec);
  run_projections_backward<P>(y, {g.context, adds}, all.subspan(of_x), exec, direct);
}

/// All checks of multi_head_backward.
template <class S>
void check_multi_head_backward(multi_head_call<S>& call, const tensor_view<const S, 3>& d_out,
                               const multi_head_gradients<S>& g) {
  const auto& x = call.x;
  const auto& w = call.w;
  layer_views check{"multi_head_backward", x, d_out, layer_views::backward_pass{}};
  check.gradient("x", g.x, x);
  check.gradient("context", g.context, call.options.context);
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
  check_multi_head<S>(check, call);
}

template <class S>
[[gnu::noinline]] void call_multi_head_backward(const tensor_view<const S, 3>& x, const multi_head_weights<S>& w,
                                                const attend_ref<S>& op, const attend_backward_ref<S>& op_backward,
                                                const tensor_view<const S, 3>& d_out, const multi_head_gradients<S>& g,
                                                const multi_head_options<S>& options, execution& exec) {
  multi_head_call<S> call(x, w, options);
  check_multi_head_backward<S>(call, d_out, g);
  run_multi_head_backward<S>(call, op, op_backward, d_out, g, exec);
}

/// op_backward as the run calls it.
template <class S, class Operator>
auto attend_backward_of(const char* name, Operator& op, const multi_head_weights<S>& w) {
  using view = tensor_view<const S>;
  using to = tensor_view<S>;
  constexpr bool takes_keys = std::invocable<Operator&, view, view, view, view, view, to, to, to, execution&>;
  static_assert(takes_keys || std::invocable<Operator&, view, view, view, to, execution&>,
                "attn: the operator's gradient must be callable as op_backward(q, k, v, out, d_out, dq, dk, dv, "
                "execution), or as op_backward(q, out, d_out, dq, execution) where it has keys and values of its own");
  if constexpr (!takes_keys) check_own_keys<S>(name, w);
  return [&op](const view& q, [[maybe_unused]] const view& k, [[maybe_unused]] const view& v, const view& out,
               const view& d_out, const to& dq, [[maybe_unused]] const to& dk, [[maybe_unused]] const to& dv,
               execution& e) {
    if constexpr (takes_keys)
      op(view(q), view(k), view(v), view(out), view(d_out), to(dq), to(dk), to(dv), e);
    else
      op(view(q), view(out), view(d_out), to(dq), e);
  };
}

}}}  // namespace attn::ATTN_ISA::detail
