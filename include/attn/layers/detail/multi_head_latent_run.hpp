// attn: what multi_head_latent, its step and its backward pass share: the checks of weights, and the way from x to
// queries and latents, and from the heads' output to out.
//
// The queries of a head and its shared dims are neighbours in memory, and so are the latent of a token and its rotated
// key: they are views of what was projected. Norms and rotations happen where it was stored.
#pragma once

#include <attn/layers/detail/head_norms.hpp>
#include <attn/layers/multi_head_latent_weights.hpp>
#include <attn/layers/project.hpp>

#include <optional>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Numbers of a head: of a query and key that are its own, of a value, and of those that all heads share; of a latent.
struct latent_dims {
  idx_t heads, key, value, rotary, latent;

  template <class S>
  latent_dims(const multi_head_latent_weights<S>& w, idx_t count)
      : heads(count), latent(w.latent_up.extent(1)) {
    rotary = w.latent.extent(0) - latent;
    key = (w.query ? w.query : w.query_up).extent(0) / heads - rotary;
    value = w.latent_up.extent(0) / heads - key;
  }
};

template <class S>
void check_multi_head_latent(layer_views& check, const multi_head_latent_weights<S>& w, idx_t heads,
                             compute_type<S> norm_eps, const std::optional<rotary_options<S>>& rotary,
                             const tensor_view<S, 3>& attended) {
  const idx_t* const x = check.x.extents;
  const tensor_view<const S, 1> no_bias;
  check.at_least("heads", 1, heads);
  if (w.query) {
    if (w.query_down || w.query_up || w.q_norm)
      check.fail("either a query weight, or query_down, q_norm and query_up", "both");
    check.linear("query weight", w.query, "", no_bias, x[2]);
  } else {
    if (!w.query_down) check.fail("a query weight, or query_down and query_up", "none");
    check.linear("query_down weight", w.query_down, "", no_bias, x[2]);
    check.list("q_norm", w.q_norm, "row of query_down", w.query_down.extent(0));
    check.linear("query_up weight", w.query_up, "", no_bias, w.query_down.extent(0));
  }
  check.linear("latent weight", w.latent, "", no_bias, x[2]);
  if (!w.latent_up) check.fail("a latent_up weight [heads (D + Dv), r]", "none");
  check.read("latent_up weight", w.latent_up);
  const auto head_rows = [&](const char* what, idx_t rows) {
    if (rows % heads != 0) check.fail({what, " rows divisible by heads ", heads}, rows);
  };
  head_rows(w.query ? "query weight" : "query_up weight", (w.query ? w.query : w.query_up).extent(0));
  head_rows("latent_up weight", w.latent_up.extent(0));
  const latent_dims dims(w, heads);
  if (dims.rotary < 0)
    check.fail({"latent weight rows >= columns of latent_up ", dims.latent}, w.latent.extent(0));
  if (dims.key < 0)
    check.fail({"rows of queries >= heads x shared dims, which are latent weight rows - columns of latent_up, ",
                heads * dims.rotary}, heads * (dims.key + dims.rotary));
  if (dims.value < 0)
    check.fail({"latent_up weight rows >= heads x dims of a query beside the shared ones ", heads * dims.key},
               w.latent_up.extent(0));
  check.list("latent_norm", w.latent_norm, "column of latent_up", dims.latent);
  if (w.output) check.linear("output weight", w.output, "", no_bias, heads * dims.value);
  if (!(norm_eps >= 0)) check.fail("norm_eps >= 0", static_cast<double>(norm_eps));
  check.out_dim(w.output ? w.output.extent(0) : heads * dims.value, w.output ? " = output weight rows" : "");
  if (attended) {
    check.extents({{"attended batch = x batch", x[0], attended.extent(0)},
                   {"attended length = x length", x[1], attended.extent(1)},
                   {"attended dim", heads * dims.value, attended.extent(2)}});
    if (check.backward) {
      check.read("attended", attended);
    } else {
      if (!w.output) check.fail("attended with an output weight: without one it is out", "no output weight");
      check.update("attended", attended);
    }
  }
  check.fits("x batch * length * heads * dims", {x[0], x[1], heads, dims.key + dims.rotary + dims.value});
  check.fits("x batch * length * latent weight rows", {x[0], x[1], w.latent.extent(0)});
  if (rotary) check_rotary(check, tensor_view<const S>(nullptr, {x[0], heads, x[1], dims.rotary}), *rotary);
}

/// Columns [begin, begin + dim) of every head of x [B, L, n], as [B, heads, L, dim].
template <class S>
tensor_view<S> columns_of_heads(const tensor_view<S, 3>& x, idx_t heads, idx_t begin, idx_t dim) {
  return split_heads(x, heads).slice(3, begin, dim);
}

/// Rows [begin, begin + count) of every head of a weight [heads n, columns], as [heads, count, columns].
template <class S>
tensor_view<S, 3> head_rows_of(const tensor_view<S, 2>& w, idx_t heads, idx_t begin, idx_t count) {
  return tensor_view<S, 3>(w.data(), {heads, w.extent(0) / heads, w.extent(1)},
                           {w.extent(0) / heads * w.stride(0), w.stride(0), w.stride(1)})
      .slice(1, begin, count);
}

/// What latent_attention takes.
template <class S>
struct latent_heads {
  tensor_view<const S> q, q_rotary, latent, k_rotary;
  tensor_view<const S, 3> w_key, w_value;
};
/// Memory of what is projected, and its gradients'.
template <class S>
struct projected_latents {
  tensor_view<S, 3> down, normed_down;  // of queries that are projected twice; normed_down may be down
  tensor_view<S, 3> q, rows;            // queries; [c; k_rotary]
  tensor_view<S, 3> latent;             // c after its norm: columns of the rows, or separate

  /// `keep_norm_inputs`: what was projected stays as it was before the norms.
  static projected_latents layout(arena& memory, const multi_head_latent_weights<S>& w, idx_t batch, idx_t length,
                                  bool keep_norm_inputs) {
    const auto allocate = [&](idx_t dim) { return allocate_sequence<S>(memory, batch, length, dim); };
    projected_latents p;
    if (!w.query) p.normed_down = p.down = allocate(w.query_down.extent(0));
    p.q = allocate((w.query ? w.query : w.query_up).extent(0));
    p.rows = allocate(w.latent.extent(0));
    p.latent = p.rows.slice(2, 0, w.latent_up.extent(1));
    if (keep_norm_inputs && w.q_norm) p.normed_down = allocate(p.down.extent(2));
    if (keep_norm_inputs && w.latent_norm) p.latent = allocate(p.latent.extent(2));
    return p;
  }
  /// c before its norm.
  tensor_view<S, 3> raw_latent() const { return rows.slice(2, 0, latent.extent(2)); }
  tensor_view<S> q_own(const latent_dims& d) const { return columns_of_heads(q, d.heads, 0, d.key); }
  tensor_view<S> q_rotary(const latent_dims& d) const { return columns_of_heads(q, d.heads, d.key, d.rotary); }
  tensor_view<S> k_rotary(const latent_dims& d) const { return columns_of_heads(rows, 1, d.latent, d.rotary); }
};

/// A checked call of the layer, or the way back through it.
template <class S>
struct multi_head_latent_call {
  const char* name;
  tensor_view<const S, 3> x;
  tensor_view<S, 3> out;
  const multi_head_latent_weights<S>& w;
  idx_t heads;
  compute_type<S> norm_eps;
  const std::optional<rotary_options<S>>& rotary;
  tensor_view<S, 3> attended;

  latent_dims dims() const { return {w, heads}; }

  /// Rotates shared dims in place, or back.
  void rotate(const tensor_view<S>& shared, bool back, execution& exec) const {
    constexpr const char* what = "shared dims";
    if (rotary) run_rotary<S>(validator(name), shared, shared, {what, what}, *rotary, back, false, exec);
  }
};

/// From x to queries and latents.
template <class S>
latent_heads<S> project_latents(const multi_head_latent_call<S>& call, const projected_latents<S>& p,
                                execution& exec) {
  const auto& w = call.w;
  const latent_dims d = call.dims();
  const tensor_view<const S, 1> no_bias;
  with_products<S>(exec, [&]<class P>(std::type_identity<P>) {
    const projection<P> list[] = {{{w.query ? w.query : w.query_down, no_bias}, w.query ? p.q : p.down},
                                  {{w.latent, no_bias}, p.rows}};
    run_projections<P>(call.x, list, exec);
  });
  if (!w.query) {
    if (w.q_norm) normalise_heads<S>(p.down, p.normed_down, w.q_norm, call.norm_eps, exec);
    run_project<S>(p.normed_down, p.q, {w.query_up}, exec);
  }
  if (w.latent_norm) normalise_heads<S>(p.raw_latent(), p.latent, w.latent_norm, call.norm_eps, exec);
  call.rotate(p.q_rotary(d), false, exec);
  call.rotate(p.k_rotary(d), false, exec);
  return {p.q_own(d), p.q_rotary(d), split_heads(p.latent, 1), p.k_rotary(d),
          head_rows_of<const S>(w.latent_up, d.heads, 0, d.key),
          head_rows_of<const S>(w.latent_up, d.heads, d.key, d.value)};
}

/// latent_attention, or its step.
template <class S>
using attend_latents_ref = function_ref<void(const latent_heads<S>&, const tensor_view<S>& out, execution&)>;

template <class S>
void run_multi_head_latent(const multi_head_latent_call<S>& call, const attend_latents_ref<S>& attend,
                           execution& exec) {
  struct buffers {
    projected_latents<S> projected;
    tensor_view<S, 3> attended;
  };
  const idx_t batch = call.x.extent(0), length = call.x.extent(1);
  const auto workspace = exec.workspace([&](arena& memory) {
    return buffers{projected_latents<S>::layout(memory, call.w, batch, length, false),
                   !call.w.output  ? call.out
                   : call.attended ? call.attended
                                   : allocate_sequence<S>(memory, batch, length, call.w.output.extent(1))};
  });
  const auto& [projected, attended] = *workspace;
  attend(project_latents<S>(call, projected, exec), split_heads(attended, call.heads), exec);
  if (call.w.output) run_project<S>(attended, call.out, {call.w.output}, exec);
}

}}}  // namespace attn::ATTN_ISA::detail
