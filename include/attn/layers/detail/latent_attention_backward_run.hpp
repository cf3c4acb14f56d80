// attn: the run of latent_attention_backward. For some heads at a time
//   1. their keys and values are made again, and attended backward
//   2. gradients of keys and values become those of latents and weights, by the products of project_backward
// Latents and k_rotary serve all heads: their gradients are added up in the order of heads, in the compute type.
#pragma once

#include <attn/layers/detail/latent_attention_run.hpp>
#include <attn/layers/project_backward.hpp>
#include <attn/softmax/detail/full_softmax_backward_run.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Gradients that are not wanted are null.
template <class S>
struct latent_backward_call {
  using T = compute_type<S>;

  latent_call<S> forward;
  tensor_view<const S> out, d_out;
  tensor_view<const T, 3> d_lse;
  tensor_view<S> dq, dq_rotary, d_latent, dk_rotary;
  tensor_view<S, 3> dw_key, dw_value;
  tensor_view<T> d_bias;
  tensor_view<T, 1> d_slopes, d_sinks;
  bool accumulate;
};

template <class S>
struct latent_backward_driver {
  using T = compute_type<S>;
  using P = product_type<S>;

  const latent_backward_call<S>& in;
  const latent_views<S>& views = in.forward.views;
  const attention_shape& shape = in.forward.attend.shape;
  execution& exec = in.forward.attend.exec;
  idx_t most = heads_together<S>(shape);

  bool want_queries() const { return in.dq || in.dq_rotary; }
  bool want_keys() const { return in.d_latent || in.dk_rotary || in.dw_key; }
  bool want_values() const { return in.d_latent || in.dw_value; }

  /// Of some heads.
  struct buffers {
    S *both_queries, *keys, *values, *dq, *dk, *dv;
    T *d_latent, *dk_rotary;  // [B, Lk, ...]: sums over heads
  };
  buffers layout(arena& memory) const {
    const auto rows = [&](bool wanted, idx_t length, idx_t dim) {
      return memory.allocate<S>(wanted ? shape.batch * most * length * dim : 0);
    };
    const auto sums = [&](const tensor_view<S>& wanted) {
      return memory.allocate<T>(wanted ? shape.batch * shape.keys * wanted.extent(3) : 0);
    };
    return {.both_queries = memory_of_both(memory, views.q, views.q_rotary),
            .keys = rows(true, shape.keys, shape.dim), .values = rows(true, shape.keys, shape.dim_v),
            .dq = rows(want_queries(), shape.queries, shape.dim), .dk = rows(want_keys(), shape.keys, shape.dim),
            .dv = rows(want_values(), shape.keys, shape.dim_v), .d_latent = sums(in.d_latent),
            .dk_rotary = sums(in.dk_rotary)};
  }

  /// The gradients of the softmax over keys and values of `count` heads; those of parameters are added.
  void attend_back(const buffers& x, const tensor_view<const S>& q, const tensor_view<S>& keys,
                   const tensor_view<S>& values, idx_t first) const {
    const idx_t count = keys.extent(1);
    const auto gradient = [&](S* memory, bool wanted, idx_t length, idx_t dim) {
      if (!wanted) return tensor_view<S>();
      std::fill_n(memory, shape.batch * count * length * dim, S(0));
      return tensor_view<S>(memory, {shape.batch, count, length, dim});
    };
    const auto of_heads = [&](const tensor_view<T, 1>& list) { return list ? list.slice(0, first, count) : list; };
    softmax_backward_call<S, no_score, no_score_backward> call{
        .forward = heads_of_call(in.forward.attend, first, count),
        .q = q.slice(1, first, count), .k = keys, .v = values, .out = in.out.slice(1, first, count),
        .d_out = in.d_out.slice(1, first, count), .shape = shape, .d_lse = {}, .accumulate = true,
        .score_backward = nullptr};
    call.shape.heads = call.shape.kv_heads = count;
    if (in.d_lse) call.d_lse = in.d_lse.slice(1, first, count);
    call.dq = gradient(x.dq, want_queries(), shape.queries, shape.dim);
    call.dk = gradient(x.dk, want_keys(), shape.keys, shape.dim);
    call.dv = gradient(x.dv, want_values(), shape.keys, shape.dim_v);
    call.d_bias = some_heads(in.d_bias, first, count);
    call.d_slopes = of_heads(in.d_slopes), call.d_sinks = of_heads(in.d_sinks);
    auto& forward = call.forward;
    forward.q = call.q, forward.k = keys, forward.v = values.slice(3, 0, 0);
    forward.out = {nullptr, {shape.batch, count, shape.queries, 0}};
    forward.shape.dim_v = 0;
    call.furthest = forward.furthest();
    run_full_softmax_backward(call);
    if (in.dq) store(call.dq.slice(3, 0, in.dq.extent(3)), in.dq.slice(1, first, count));
    if (in.dq_rotary)
      store(call.dq.slice(3, views.q.extent(3), views.rotary_dim()), in.dq_rotary.slice(1, first, count));
    if (in.dk_rotary) add_rotary(call.dk.slice(3, views.q.extent(3), views.rotary_dim()), x.dk_rotary);
    project_back(x, call.dk, call.dv, first);
  }

  /// Rows of gradients in scratch memory, as they are.
  template <class From>
  void store(const tensor_view<From>& from, const tensor_view<S>& to) const {
    const idx_t heads = to.extent(1);
    exec.for_each(to.extent(0) * heads, [&](idx_t n, int) {
      const auto rows = head_of(to, n / heads, n % heads);
      const auto of = head_of(from, n / heads, n % heads);
      for (idx_t i = 0; i < rows.rows; ++i)
        for (idx_t d = 0; d < rows.cols; ++d)
          store_gradient(rows.row(i)[d * rows.col_stride], static_cast<T>(of.row(i)[d]), in.accumulate);
    });
  }
  void add_rotary(const tensor_view<S>& dk, T* sums) const {
    exec.for_each(shape.batch, [&](idx_t b, int) {
      for (idx_t h = 0; h < dk.extent(1); ++h) {
        const auto rows = head_of(dk, b, h);
        for (idx_t j = 0; j < rows.rows; ++j)
          for (idx_t d = 0; d < rows.cols; ++d)
            sums[(b * shape.keys + j) * rows.cols + d] += static_cast<T>(rows.row(j)[d]);
      }
    });
  }

  void project_back(const buffers& x, const tensor_view<S>& dk, const tensor_view<S>& dv, idx_t first) const {
    const bool by_key = in.d_latent || in.dw_key, by_value = want_values();
    if (!by_key && !by_value) return;
    const idx_t count = (dk ? dk : dv).extent(1), sides = idx_t(by_key) + idx_t(by_value);
    const auto list = exec.workspace([&](arena& memory) {
      idx_t n = 0;
      return memory.allocate_list(sides * count, [&](arena&) {
        const idx_t h = n / sides;
        const bool of_key = by_key && n % sides == 0;
        ++n;
        const auto& dw = of_key ? in.dw_key : in.dw_value;
        const auto d = sequence_of_head(of_key ? dk.slice(3, 0, views.q.extent(3)) : dv, h);
        return projection_gradient<P>(matrix_of_head(of_key ? views.w_key : views.w_value, first + h),
                                      token_sum<T>(d),
                                      dw ? matrix_of_head(dw, first + h) : tensor_view<S, 2>(), tensor_view<S, 1>(),
                                      in.accumulate);
      });
    });
    const tensor_view<T, 3> d_latent(x.d_latent, {shape.batch, shape.keys, views.latent_dim()});
    run_projections_backward<P>(sequence_of_head(views.latent, 0),
                                {in.d_latent ? d_latent : tensor_view<T, 3>(), first > 0},
                                {*list, static_cast<std::size_t>(sides * count)}, exec);
  }

  void run() const {
    const auto memory = exec.workspace([&](arena& m) { return layout(m); });
    const buffers& x = *memory;
    const tensor_view<const S> q = together(views.q, views.q_rotary, x.both_queries, exec);
    if (in.d_latent) std::fill_n(x.d_latent, shape.batch * shape.keys * views.latent_dim(), T(0));
    if (in.dk_rotary) std::fill_n(x.dk_rotary, shape.batch * shape.keys * views.rotary_dim(), T(0));
    for (idx_t first = 0; first < shape.heads; first += most) {
      const idx_t count = (std::min)(most, shape.heads - first);
      const tensor_view<S> keys(x.keys, {shape.batch, count, shape.keys, shape.dim}),
          values(x.values, {shape.batch, count, shape.keys, shape.dim_v});
      expand_heads(views, first, keys, values, exec);
      attend_back(x, q, keys, values, first);
    }
    if (in.d_latent)
      store(tensor_view<T>(x.d_latent, {shape.batch, 1, shape.keys, views.latent_dim()}), in.d_latent);
    if (in.dk_rotary)
      store(tensor_view<T>(x.dk_rotary, {shape.batch, 1, shape.keys, views.rotary_dim()}), in.dk_rotary);
  }
};

template <class S>
void run_latent_attention_backward(latent_backward_call<S>& call) {
  softmax_call<S, no_score>& attend = call.forward.attend;
  // Scores are those of the expanded form by standard products: so must lse be, but for rounding.
  if (uses_fast_products<S>(attend.exec) || (sizeof(S) == 2 && call.forward.absorbed)) attend.lse = {};
  const standard_products standard(attend.exec);
  if (!call.accumulate) {
    if (call.d_bias) clear_gradient(call.d_bias);
    for (const auto& list : {call.d_slopes, call.d_sinks})
      for (idx_t h = 0; h < list.extent(0); ++h) list(h) = 0;
  }
  latent_backward_driver<S>{call}.run();
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN(S) void run_latent_attention_backward(latent_backward_call<S>&)
#include <attn/core/detail/compiled.hpp>
