// attn: a call of multi_head, its checks and its run.
#pragma once

#include <attn/layers/detail/head_norms.hpp>
#include <attn/layers/detail/output_gate.hpp>
#include <attn/layers/project.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct multi_head_weights;
template <class S>
struct multi_head_options;

namespace detail {

/// The operator: multi_head is compiled once for an element type, not for every operator.
template <class S>
using attend_ref = function_ref<void(const tensor_view<const S>& q, const tensor_view<const S>& k,
                                     const tensor_view<const S>& v, const tensor_view<S>& out, execution&)>;

/// A call, and what follows from its weights once it is checked.
template <class S>
struct multi_head_call {
  tensor_view<const S, 3> x, y;  // y: the context, or x
  const multi_head_weights<S>& w;
  const multi_head_options<S>& options;
  idx_t heads, kv_heads, dim = 0, dim_v = 0;  // dims of a head

  multi_head_call(const tensor_view<const S, 3>& from, const multi_head_weights<S>& weights,
                  const multi_head_options<S>& how)
      : x(from),
        y(how.context ? how.context : from),
        w(weights),
        options(how),
        heads(how.heads),
        kv_heads(how.kv_heads.value_or(how.heads)) {}

  /// Otherwise the operator has keys and values of its own.
  bool gives_keys() const { return w.key || w.value; }
  bool queries_are_keys() const { return !w.key && w.value; }
  idx_t attended_dim() const { return heads * dim_v; }
};

template <class S>
void check_attended(layer_views& check, const multi_head_weights<S>& w, const tensor_view<S, 3>& attended, idx_t dim) {
  check.extents({{"attended batch = x batch", check.x.extents[0], attended.extent(0)},
                 {"attended length = x length", check.x.extents[1], attended.extent(1)},
                 {"attended dim", dim, attended.extent(2)}});
  if (check.backward) return check.read("attended", attended);
  if (!w.output && !w.gate) check.fail("attended with an output weight: without one it is out", "no output weight");
  check.update("attended", attended);
}

/// The dim of a head's values.
template <class S>
idx_t check_value_dim(layer_views& check, const multi_head_call<S>& call) {
  const auto& w = call.w;
  const auto of_head = [&](const char* what, idx_t n, idx_t count) {
    if (n % count != 0) check.fail({what, " divisible by heads ", count}, n);
    return n / count;
  };
  if (w.value) {
    check.linear("value weight", w.value, "value bias", w.value_bias, call.y.extent(2));
    return of_head("value weight rows", w.value.extent(0), call.kv_heads);
  }
  if (w.value_bias) check.fail("value bias with a value weight", "no value weight");
  if (w.key)
    return of_head(call.options.context ? "a value weight, or context dim" : "a value weight, or x dim",
                   call.y.extent(2), call.kv_heads);
  if (w.output) return of_head("output weight columns", w.output.extent(1), call.heads);
  if (w.gate) return of_head("gate weight rows", w.gate.extent(0), call.heads);
  return of_head(check.backward ? "d_out dim" : "out dim", check.out.extents[2], call.heads);
}

/// Checks a call, and completes it.
template <class S>
void check_multi_head(layer_views& check, multi_head_call<S>& call) {
  const auto& w = call.w;
  const auto& options = call.options;
  const auto& y = call.y;
  const idx_t* const x = check.x.extents;
  check.read("context", y);
  check.equal("context batch = x batch", x[0], y.extent(0));
  check.at_least("heads", 1, options.heads);
  const idx_t heads = call.heads, kv_heads = call.kv_heads;
  check.at_least("kv_heads", 1, kv_heads);
  if (heads % kv_heads != 0) check.fail({"kv_heads that divide heads ", heads}, kv_heads);

  check.linear("query weight", w.query, "query bias", w.query_bias, x[2]);
  if (w.query.extent(0) % heads != 0)
    check.fail({"query weight rows divisible by heads ", heads}, w.query.extent(0));
  const idx_t dim = call.dim = w.query.extent(0) / heads, dim_v = call.dim_v = check_value_dim<S>(check, call);
  if (w.key) {
    check.linear("key weight", w.key, "key bias", w.key_bias, y.extent(2));
    check.equal("key weight rows = kv_heads x query head dim", kv_heads * dim, w.key.extent(0));
  } else {
    if (w.key_bias) check.fail("key bias with a key weight", "no key weight");
    if (w.k_norm) check.fail("k_norm with a key weight", "no key weight");
  }
  if (call.queries_are_keys()) {
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
  if (!(options.norm_eps >= 0)) check.fail("norm_eps >= 0", static_cast<double>(options.norm_eps));
  check.out_dim(w.output ? w.output.extent(0) : heads * dim_v, w.output ? " = output weight rows" : "");
  if (options.context && !call.gives_keys()) check.fail("a key or value weight, since there is a context", "neither");
  if (options.attended) check_attended<S>(check, w, options.attended, heads * dim_v);
  check.fits("context batch * length", {y.extent(0), y.extent(1)});
  check.fits("x batch * length * heads * dims", {x[0], x[1], heads, dim + dim_v});
  check.fits("context batch * length * heads * dims", {y.extent(0), y.extent(1), kv_heads, dim + dim_v});
  if (!options.rotary) return;
  check_rotary(check, tensor_view<const S>(nullptr, {x[0], heads, x[1], dim}), *options.rotary);
  if (w.key) check_rotary(check, tensor_view<const S>(nullptr, {x[0], kv_heads, y.extent(1), dim}), *options.rotary);
}

/// What the heads have in memory.
template <class S>
struct projected_heads {
  tensor_view<S, 3> q{}, k{}, v{}, gate{};  // k is q where queries serve as keys; null where it is not projected

  projected_heads() = default;
  projected_heads(arena& memory, const multi_head_call<S>& call) {
    const auto allocate = [&](const tensor_view<const S, 3>& from, idx_t n) {
      return allocate_sequence<S>(memory, from.extent(0), from.extent(1), n);
    };
    const auto& w = call.w;
    q = allocate(call.x, w.query.extent(0));
    if (call.gives_keys()) k = w.key ? allocate(call.y, w.key.extent(0)) : q;
    if (w.value) v = allocate(call.y, w.value.extent(0));
    if (w.gate) gate = allocate(call.x, w.gate.extent(0));
  }

  /// What the operator is given; k and v are null where it has its own.
  tensor_view<const S> queries(const multi_head_call<S>& call) const { return split_heads(q, call.heads); }
  tensor_view<const S> keys(const multi_head_call<S>& call) const {
    return k ? tensor_view<const S>(split_heads(k, call.kv_heads)) : tensor_view<const S>();
  }
  tensor_view<const S> values(const multi_head_call<S>& call) const {
    if (!call.gives_keys()) return {};
    return split_heads(v ? tensor_view<const S, 3>(v) : call.y, call.kv_heads);
  }
};

/// q, k, v and the gate before its activation.
template <class S>
void project_heads(const multi_head_call<S>& call, const projected_heads<S>& to, execution& exec) {
  const auto& w = call.w;
  const auto &x = call.x, &y = call.y;
  with_products<S>(exec, [&]<class P>(std::type_identity<P>) {
    const projection<P> query{{w.query, w.query_bias}, to.q}, gate{{w.gate, w.gate_bias}, to.gate},
        value{{w.value, w.value_bias}, to.v}, key{{w.key, w.key_bias}, to.k};
    const projection<P> list[] = {query, w.gate ? gate : w.value ? value : key, w.gate && w.value ? value : key, key};
    const std::size_t of_x = w.gate ? 2 : 1, of_y = (w.value ? 1 : 0) + (w.key ? 1 : 0);
    const std::span all(list, of_x + of_y);
    if (of_y == 0 || (x.data() == y.data() && x.extents() == y.extents() && x.strides() == y.strides())) {
      run_projections<P>(x, all, exec);
    } else {
      run_projections<P>(x, all.first(of_x), exec);
      run_projections<P>(y, all.subspan(of_x), exec);
    }
  });
}

/// Norms and rotations of the queries and keys in `from`, which may be `to`.
template <class S>
void prepare_heads(const multi_head_call<S>& call, const projected_heads<S>& from, const projected_heads<S>& to,
                   execution& exec) {
  const auto& w = call.w;
  const auto& options = call.options;
  if (w.q_norm) normalise_heads<S>(from.q, to.q, w.q_norm, options.norm_eps, exec);
  if (w.k_norm) normalise_heads<S>(from.k, to.k, w.k_norm, options.norm_eps, exec);
  if (!options.rotary) return;
  rotate_heads<S>(to.q, call.heads, *options.rotary, false, exec);
  if (w.key) rotate_heads<S>(to.k, call.kv_heads, *options.rotary, false, exec);
}

template <class S>
void run_multi_head(const multi_head_call<S>& call, const tensor_view<S, 3>& out, const attend_ref<S>& op,
                    execution& exec) {
  const auto& w = call.w;
  const auto& options = call.options;
  struct buffers {
    projected_heads<S> heads;
    tensor_view<S, 3> attended;
  };
  const auto workspace = exec.workspace([&](arena& memory) {
    const projected_heads<S> heads(memory, call);
    return buffers{heads, !w.output && !w.gate ? out
                          : options.attended   ? tensor_view<S, 3>(options.attended)
                                               : allocate_sequence<S>(memory, call.x.extent(0), call.x.extent(1),
                                                                      call.attended_dim())};
  });
  const auto& [projected, attended] = *workspace;
  project_heads<S>(call, projected, exec);
  prepare_heads<S>(call, projected, projected, exec);
  op(projected.queries(call), projected.keys(call), projected.values(call), split_heads(attended, call.heads), exec);
  const tensor_view<S, 3> gated = !w.gate ? attended : w.output ? projected.gate : out;
  if (w.gate) apply_gate<S>(attended, projected.gate, options.gate_activation, gated, exec);
  if (w.output) run_project<S>(gated, out, {w.output, w.output_bias}, exec);
}

template <class S>
[[gnu::noinline]] void call_multi_head(const tensor_view<const S, 3>& x, const tensor_view<S, 3>& out,
                                       const multi_head_weights<S>& w, const multi_head_options<S>& options,
                                       const attend_ref<S>& op, execution& exec) {
  layer_views check{"multi_head", x, out, false};
  multi_head_call<S> call(x, w, options);
  check_multi_head<S>(check, call);
  run_multi_head<S>(call, out, op, exec);
}

/// Of an operator that takes no keys and values.
template <class S>
void check_own_keys(const char* name, const multi_head_weights<S>& w) {
  if (w.key || w.value)
    validator(name).fail("an operator that takes keys and values, since there are weights of them", "one without");
}

/// op as the run calls it.
template <class S, class Operator>
auto attend_of(const char* name, Operator& op, const multi_head_weights<S>& w) {
  using view = tensor_view<const S>;
  constexpr bool takes_keys = std::invocable<Operator&, view, view, view, tensor_view<S>, execution&>;
  static_assert(takes_keys || std::invocable<Operator&, view, tensor_view<S>, execution&>,
                "attn: the operator must be callable as op(q, k, v, out, execution), or as op(q, out, execution) where "
                "it has keys and values of its own");
  if constexpr (!takes_keys) check_own_keys<S>(name, w);
  return [&op](const view& q, [[maybe_unused]] const view& k, [[maybe_unused]] const view& v,
               const tensor_view<S>& out, execution& e) {
    if constexpr (takes_keys)
      op(view(q), view(k), view(v), tensor_view<S>(out), e);
    else
      op(view(q), tensor_view<S>(out), e);
  };
}

}}}  // namespace attn::ATTN_ISA::detail
