// attn: latent_attention: its views and their checks, its call, and its two runs.
#pragma once

#include <attn/layers/latent_form.hpp>
#include <attn/layers/detail/weight_gradients.hpp>
#include <attn/layers/project.hpp>
#include <attn/softmax/detail/full_softmax_run.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// x and y as one view of channels, where those of y follow those of x in memory; else null.
template <class S>
tensor_view<S> joined(const tensor_view<S>& x, const tensor_view<S>& y) {
  const idx_t dim = x.extent(3) + y.extent(3);
  const tensor_view<S> both = x.extent(3) > 0 ? x : y;
  if (!x.empty() && !y.empty()) {
    if (x.stride(3) != y.stride(3) || y.data() != x.data() + x.extent(3) * x.stride(3)) return {};
    for (int axis = 0; axis < 3; ++axis)
      if (x.extent(axis) > 1 && x.stride(axis) != y.stride(axis)) return {};
  }
  return {both.data(), {x.extent(0), x.extent(1), x.extent(2), dim}, both.strides()};
}

/// Head h of x [B, H, L, D] as a sequence [B, L, D].
template <class S>
tensor_view<S, 3> sequence_of_head(const tensor_view<S>& x, idx_t h) {
  const auto one = x.slice(1, h, 1);
  return {one.data(), {x.extent(0), x.extent(2), x.extent(3)}, {x.stride(0), x.stride(2), x.stride(3)}};
}
/// What latent_attention and its step read.
template <class S>
struct latent_views {
  tensor_view<const S> q{}, q_rotary{}, latent{}, k_rotary{};
  tensor_view<const S, 3> w_key{}, w_value{};

  template <class Q, class QR, class L, class KR, class W, class U>
  static latent_views of(const Q& q, const QR& q_rotary, const L& latent, const KR& k_rotary, const W& w_key,
                         const U& w_value) {
    require_one_element_type<const Q&, const QR&, const L&, tensor_view<S>>();
    require_one_element_type<const Q&, const KR&, const L&, tensor_view<S>>();
    return {as_view(q),        as_view(q_rotary),    as_view(latent),
            as_view(k_rotary), weights_of_heads(w_key), weights_of_heads(w_value)};
  }

  idx_t latent_dim() const { return latent.extent(3); }
  idx_t rotary_dim() const { return q_rotary.extent(3); }

  /// Checks the views that are read against one another.
  attention_shape validate(call_views& check, const memory_layout& out) {
    const idx_t batch = q.extent(0), heads = q.extent(1), queries = q.extent(2), keys = latent.extent(2);
    for (auto* x : {&q_rotary, &k_rotary})  // null views have no channels
      if (!*x) *x = {nullptr, {batch, x == &q_rotary ? heads : 1, x == &q_rotary ? queries : keys, 0}};
    check.read("q", q);
    check.read("q_rotary", q_rotary, {{"q_rotary batch = query batch", batch},
                                      {"q_rotary heads = query heads", heads},
                                      {"q_rotary length = query length", queries}});
    check.read("latent", latent, {{"latent batch = query batch", batch}, {"latent heads", 1}});
    check.read("k_rotary", k_rotary, {{"k_rotary batch = query batch", batch},
                                      {"k_rotary heads", 1},
                                      {"k_rotary length = latent length", keys},
                                      {"k_rotary dim = q_rotary dim", rotary_dim()}});
    check.read("w_key", w_key, {{"w_key heads = query heads", heads},
                                {"w_key rows = query dim", q.extent(3)},
                                {"w_key columns = latent dim", latent_dim()}});
    check.read("w_value", w_value, {{"w_value heads = query heads", heads},
                                    {},
                                    {"w_value columns = latent dim", latent_dim()}});
    const idx_t dim = q.extent(3) + rotary_dim(), dim_v = w_value.extent(1);
    const auto layout = [&](idx_t length, idx_t channels) {
      return tensor_view<const S>(nullptr, {batch, heads, length, channels});
    };
    check.fits("queries over latents", {batch, heads, queries, latent_dim() + rotary_dim(), 16});
    return check_attention_extents(check, layout(queries, dim), layout(keys, dim), layout(keys, dim_v), out);
  }

 private:
  template <class W>
  static tensor_view<const S, 3> weights_of_heads(const W& w) {
    static_assert(std::same_as<element_of<const W&>, S>, "attn: w_key and w_value must have the element type of q");
    if constexpr (eigen_memory<const W&>) {
      return tensor_view<const S, 3>(w);
    } else {
      constexpr bool fits = decltype(as_view(w))::rank == 3;
      static_assert(fits, "attn: w_key and w_value must be [heads, rows, latent dim], or a matrix of one head");
      if constexpr (fits) return as_view(w);
    }
  }
};

/// A checked call: what is read, and the call of the softmax over it but for its q, k and v, which each form makes.
template <class S>
struct latent_call {
  latent_views<S> views;
  softmax_call<S, no_score> attend;
  bool absorbed;
};

/// Whether the absorbed form takes fewer operations: by one head of one item, so that heads and items alone agree.
inline bool absorbed_is_shorter(const attention_shape& s, idx_t latent_dim, idx_t rotary_dim, bool causal) {
  const double queries = static_cast<double>(s.queries), keys = static_cast<double>(s.keys),
               r = static_cast<double>(latent_dim), dims = static_cast<double>(s.dim - rotary_dim + s.dim_v),
               last = (std::min)(queries, keys), pairs = causal ? last * (keys - last / 2) : queries * keys;
  return queries * r * dims + pairs * (2 * r + static_cast<double>(rotary_dim)) <
         keys * r * dims + pairs * (dims + static_cast<double>(rotary_dim));
}

/// The call after the checks of its views; checks the options.
template <class S, class Options>
latent_call<S> latent_call_of(call_views& check, const latent_views<S>& views, const attention_shape& shape,
                              const Options& given, latent_form form, execution& exec) {
  latent_call<S> call{views, {{}, check, {}, exec}, form == latent_form::absorbed};
  const auto parameters = parameters_of<S>(given);
  check_softmax_options(check, shape, parameters);
  set_options(call.attend, shape, parameters);
  if (form == latent_form::automatic)
    call.absorbed = absorbed_is_shorter(shape, views.latent_dim(), views.rotary_dim(), call.attend.causal);
  return call;
}
/// The call of latent_attention, and of its step.
template <class S, class Options>
latent_call<S> checked_latent_call(call_views& check, latent_views<S>& views, const tensor_view<S>& out,
                                   const Options& given, latent_form form, execution& exec) {
  const attention_shape s = views.validate(check, out);
  if (given.lse)
    check.write("lse", given.lse, {{"lse batch = query batch", s.batch},
                                   {"lse heads = query heads", s.heads},
                                   {"lse length = query length", s.queries}});
  check.write("out", out);
  auto call = latent_call_of(check, views, s, given, form, exec);
  call.attend.out = out;
  return call;
}

/// Copies channels of x to those of `to` from `first` on; one head of x serves all.
template <class S, class From>
void copy_channels(const tensor_view<From>& x, const tensor_view<S>& to, idx_t first, execution& exec) {
  const idx_t heads = to.extent(1);
  exec.for_each(x.extent(3) > 0 ? to.extent(0) * heads : 0, [&](idx_t n, int) {
    const auto from = head_of(x, n / heads, x.extent(1) == 1 ? 0 : n % heads);
    const auto rows = head_of(to, n / heads, n % heads);
    for (idx_t i = 0; i < from.rows; ++i)
      for (idx_t d = 0; d < from.cols; ++d) rows.row(i)[first + d] = from.row(i)[d * from.col_stride];
  });
}

/// [x; y], in the memory that is given where they are not one view already.
template <class S>
tensor_view<const S> together(const tensor_view<const S>& x, const tensor_view<const S>& y, S* memory,
                              execution& exec) {
  if (!memory) return joined(x, y);
  const tensor_view<S> both(memory, {x.extent(0), x.extent(1), x.extent(2), x.extent(3) + y.extent(3)});
  copy_channels(x, both, 0, exec);
  copy_channels(y, both, x.extent(3), exec);
  return both;
}
template <class S>
S* memory_of_both(arena& memory, const tensor_view<const S>& x, const tensor_view<const S>& y) {
  return joined(x, y) ? nullptr : memory.allocate<S>(x.size() + y.size());
}

/// Heads [first, first + count) of what a call has for each of them.
template <class T>
tensor_view<T> some_heads(const tensor_view<T>& x, idx_t first, idx_t count) {
  return x.extent(1) > 1 ? x.slice(1, first, count) : x;
}
template <class S>
softmax_call<S, no_score> heads_of_call(softmax_call<S, no_score> call, idx_t first, idx_t count) {
  const auto part = [&](auto& list) {
    if (!list.empty()) list = list.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count));
  };
  call.out = call.out.slice(1, first, count);
  if (call.lse) call.lse = call.lse.slice(1, first, count);
  std::span<const compute_type<S>> sinks = call.sinks;
  part(sinks), part(call.terms.slopes);
  call.sinks = {sinks.data(), sinks.size()};
  call.terms.bias = some_heads(call.terms.bias, first, count);
  call.terms.mask = some_heads(call.terms.mask, first, count);
  call.shape.heads = call.shape.kv_heads = count;
  return call;
}

/// Heads whose keys and values are in memory at the same time: 32 MiB of an item. Batch and threads have no part in it.
template <class S>
idx_t heads_together(const attention_shape& s) {
  const idx_t bytes = s.keys * (s.dim + s.dim_v) * idx_t(sizeof(S));
  return std::clamp<idx_t>((idx_t(32) << 20) / std::max<idx_t>(bytes, 1), 1, std::max<idx_t>(s.heads, 1));
}

/// Keys [B, count, Lk, Dn + Dr] and values [B, count, Lk, Dv] of heads from `first` on.
template <class S>
void expand_heads(const latent_views<S>& views, idx_t first, const tensor_view<S>& keys, const tensor_view<S>& values,
                  execution& exec) {
  const idx_t count = keys.extent(1), dim = keys.extent(3) - views.rotary_dim();
  const auto made = keys.slice(3, 0, dim);
  with_products<S>(exec, [&]<class P>(std::type_identity<P>) {
    const auto list = exec.workspace([&](arena& memory) {
      idx_t n = 0;
      return memory.allocate_list(2 * count, [&](arena&) {
        const idx_t h = n / 2, one = n++ % 2;
        return projection<P>{{matrix_of_head(one ? views.w_value : views.w_key, first + h), tensor_view<const S, 1>()},
                             sequence_of_head(one ? values : made, h)};
      });
    });
    run_projections<P>(sequence_of_head(views.latent, 0), {*list, static_cast<std::size_t>(2 * count)}, exec);
  });
  copy_channels(views.k_rotary, keys, dim, exec);
}

template <class S>
void run_expanded(const latent_call<S>& call) {
  const attention_shape& s = call.attend.shape;
  const latent_views<S>& views = call.views;
  execution& exec = call.attend.exec;
  const idx_t most = heads_together<S>(s);
  const auto memory = exec.workspace([&](arena& m) {
    return std::tuple(memory_of_both(m, views.q, views.q_rotary), m.allocate<S>(s.batch * most * s.keys * s.dim),
                      m.allocate<S>(s.batch * most * s.keys * s.dim_v));
  });
  const auto [of_queries, of_keys, of_values] = *memory;
  const tensor_view<const S> q = together(views.q, views.q_rotary, of_queries, exec);
  for (idx_t first = 0; first < s.heads; first += most) {
    const idx_t count = (std::min)(most, s.heads - first);
    const tensor_view<S> keys(of_keys, {s.batch, count, s.keys, s.dim}),
        values(of_values, {s.batch, count, s.keys, s.dim_v});
    expand_heads(views, first, keys, values, exec);
    auto part = heads_of_call(call.attend, first, count);
    part.q = q.slice(1, first, count), part.k = keys, part.v = values;
    run_full_softmax(part);
  }
}

/// One product for each head: to_h = from_h W_h^T, or from_h W_h where `turned`. Threads share the heads: the weight of
/// one is too little work for several of them.
template <class S>
void project_each_head(const tensor_view<const S>& from, const tensor_view<const S, 3>& weights, bool turned,
                       const tensor_view<S>& to, execution& exec) {
  const double numbers = static_cast<double>(weights.size()),
               tokens = static_cast<double>(from.extent(0) * from.extent(2));
  const auto limit = exec.limit_threads({.operations = 2 * tokens * numbers, .bytes = double(sizeof(S)) * numbers});
  with_products<S>(exec, [&]<class P>(std::type_identity<P>) {
    for_each_head(from.extent(1), 1, exec, [&](idx_t h, execution& by) {
      const auto w = matrix_of_head(weights, h);
      const projection<P> one{{turned ? transposed(w) : w, tensor_view<const S, 1>()}, sequence_of_head(to, h)};
      run_projections<P>(sequence_of_head(from, h), {&one, 1}, by);
    });
  });
}

/// The absorbed form: queries over latents [B, H, Lq, r + Dr], and what they attend to, [B, H, Lq, r].
template <class S>
struct absorbed_rows {
  tensor_view<S> q, out;

  static absorbed_rows layout(arena& memory, const latent_call<S>& call) {
    const attention_shape& s = call.attend.shape;
    const auto allocate = [&](idx_t dim) {
      return tensor_view<S>(memory.allocate<S>(s.batch * s.heads * s.queries * dim),
                            {s.batch, s.heads, s.queries, dim});
    };
    return {allocate(call.views.latent_dim() + call.views.rotary_dim()), allocate(call.views.latent_dim())};
  }
};

/// Fills the queries; returns the call over latents, which are one key head, but for its k and v.
template <class S>
softmax_call<S, no_score> absorb_queries(const latent_call<S>& call, const absorbed_rows<S>& rows) {
  execution& exec = call.attend.exec;
  const idx_t r = call.views.latent_dim();
  project_each_head(call.views.q, call.views.w_key, true, rows.q.slice(3, 0, r), exec);
  copy_channels(call.views.q_rotary, rows.q, r, exec);
  auto over_latents = call.attend;
  over_latents.q = rows.q, over_latents.out = rows.out;
  over_latents.shape.kv_heads = 1, over_latents.shape.dim = rows.q.extent(3), over_latents.shape.dim_v = r;
  return over_latents;
}
/// The result, from what the queries attended to.
template <class S>
void finish_absorbed(const latent_call<S>& call, const absorbed_rows<S>& rows) {
  project_each_head<S>(rows.out, call.views.w_value, false, call.attend.out, call.attend.exec);
}

template <class S>
void run_latent_attention(const latent_call<S>& call) {
  if (call.attend.shape.heads == 0) return;
  if (!call.absorbed) return run_expanded(call);
  const latent_views<S>& views = call.views;
  execution& exec = call.attend.exec;
  const auto memory = exec.workspace([&](arena& m) {
    return std::pair(absorbed_rows<S>::layout(m, call), memory_of_both(m, views.latent, views.k_rotary));
  });
  auto over_latents = absorb_queries(call, memory->first);
  over_latents.k = together(views.latent, views.k_rotary, memory->second, exec);
  over_latents.v = over_latents.k.slice(3, 0, views.latent_dim());
  run_full_softmax(over_latents);
  finish_absorbed(call, memory->first);
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN(S) void run_latent_attention(const latent_call<S>&)
#include <attn/core/detail/compiled.hpp>
#define ATTN_RUN(S) softmax_call<S, no_score> absorb_queries(const latent_call<S>&, const absorbed_rows<S>&)
#include <attn/core/detail/compiled.hpp>
#define ATTN_RUN(S) void finish_absorbed(const latent_call<S>&, const absorbed_rows<S>&)
#include <attn/core/detail/compiled.hpp>
