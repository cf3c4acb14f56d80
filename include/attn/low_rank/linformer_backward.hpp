// attn: the gradients of linformer.
//
//   attn::linformer(q, k, v, out, e, f, {.lengths = lengths}, threads);
//   attn::linformer_backward(q, k, v, out, e, f, d_out, {.q = dq, .k = dk, .v = dv, .e = de, .f = df},
//                            {.lengths = lengths}, threads);
//
// With K' = E K, V' = F V: q, K' and V' have the gradients of softmax attention over rank keys, and
//   dk = E^T dK',  dE = dK' k^T,  dv = F^T dV',  dF = dV' v^T.
// Of out and lse only the shapes are read, since the softmax runs over few keys and is computed again; they are
// arguments because they are those of every softmax operator. Where E and F are the same matrix,
// its gradient is the sum of .e and .f.
//
// Shapes   as the forward call's, d_out as out, d_lse as lse. Gradients have the shapes of what they are of; dk and dv
//          are summed over the query heads of a group, those of projections over the batch, in order, and over the
//          heads where one projection serves all. A batch item with n keys adds nothing to columns n, n + 1, ... of E
//          and F.
// Cost     2 rank Lq (3 D + 2 Dv) + 6 rank Lk (D + Dv) operations per head. Scratch: what the forward call takes, the
//          gradients of E and F in the compute type, and, per head, 3 + n times rank (D + Dv) numbers, n = Lq / 2048
//          from 1 to 16.
// Throws   std::invalid_argument for shapes or options that do not fit, for gradients that share memory with an input
//          or one another, before anything is written.
#pragma once

#include <attn/low_rank/detail/linformer_backward_call.hpp>

namespace attn::inline ATTN_ISA {

/// The gradients linformer_backward writes: those given. S is the element type of the call.
template <class S>
struct linformer_gradients {
  using real = compute_type<S>;

  view_field<S> q{}, k{}, v{};
  /// [H or 1, rank, Lk], as the projections.
  view_field<S, 3> e{}, f{};
  /// Read, not written: the gradient of lse, [B, H, Lq].
  view_field<const real, 3> d_lse{};
  /// Add to what is there, instead of writing it over.
  bool accumulate = false;
};

/// The gradients of linformer. See the top of the file.
template <viewable Q, viewable K, viewable V, viewable O, viewable E, viewable F, viewable D,
          class Options = linformer_options<element_of<const Q&>>>
void linformer_backward(const Q& q, const K& k, const V& v, const O& out, const E& e, const F& f, const D& d_out,
                        const linformer_gradients<element_of<const Q&>>& gradients, Options&& options = {},
                        execution_ref exec = {}) {
  using S = element_of<const Q&>;
  using T = compute_type<S>;
  detail::require_one_element_type<const Q&, const K&, const V&, tensor_view<S>>();
  detail::require_one_element_type<const Q&, const O&, const D&, tensor_view<S>>();
  const tensor_view<const S, 3> by_e = detail::projection_view<S>(e), by_f = detail::projection_view<S>(f);
  const tensor_view<const S> result = as_view(out), d_result = as_view(d_out);
  const auto& given = detail::options_or_default<linformer_options<S>>(options);

  const detail::validator check("linformer_backward");
  detail::attention_views<S> views{
      .q = as_view(q), .k = as_view(k), .v = as_view(v), .out = {}, .shape = {}, .lengths = {}};
  detail::backward_views all;
  all.gradient("the gradient of q", gradients.q, "q", views.q);
  all.gradient("the gradient of k", gradients.k, "k", views.k);
  all.gradient("the gradient of v", gradients.v, "v", views.v);
  all.gradient("the gradient of e", gradients.e, "e", by_e);
  all.gradient("the gradient of f", gradients.f, "f", by_f);
  all.read("out", result);
  all.read("d_out", d_result);
  all.read("lse", given.lse);
  all.read("d_lse", gradients.d_lse);
  all.check(check);
  const detail::attention_shape s = views.shape =
      detail::check_attention_extents(check, views.q, views.k, views.v, result);
  detail::check_same_shape(check, "d_out", d_result, "out", result);
  const tensor_view<const T, 3> rows(nullptr, {s.batch, s.heads, s.queries});
  if (given.lse) detail::check_same_shape(check, "lse", given.lse, "the rows of out", rows);
  if (gradients.d_lse) detail::check_same_shape(check, "d_lse", gradients.d_lse, "the rows of out", rows);
  views.lengths = detail::check_lengths(check, s, given);
  detail::check_scale(check, given.scale);
  detail::check_projections(check, s, by_e, by_f, tensor_view<S>(), tensor_view<T, 3>());
  if (s.heads == 0) {
    if (!gradients.accumulate)
      for (const tensor_view<S, 3>& x : {gradients.e, gradients.f})
        detail::clear_gradient(tensor_view<S>(x.data(), {1, x.extent(0), x.extent(1), x.extent(2)},
                                              {0, x.stride(0), x.stride(1), x.stride(2)}));
    return;
  }

  execution& threads = detail::execution_of(exec, options);
  const double scores = static_cast<double>(by_e.extent(1)) * static_cast<double>(s.queries + s.keys);
  const auto limit = threads.limit_threads({.operations = 2.75 * scores * s.operations_per_score()});
  const auto heads = [&](const auto& projection) { return projection.extent(0) == 1 ? s.kv_heads : s.heads; };
  detail::linformer_backward_call<S>{
      .views = views,
      .d_out = d_result,
      .d_lse = gradients.d_lse,
      .dq = gradients.q,
      .accumulate = gradients.accumulate,
      .terms = detail::terms_of<T>(given, s.dim),
      .keys = {.e = by_e, .x = views.k, .heads = heads(by_e)},
      .values = {.e = by_f, .x = views.v, .heads = heads(by_f)},
      .key_gradients = {.e = gradients.e, .x = gradients.k},
      .value_gradients = {.e = gradients.f, .x = gradients.v},
      .shared = by_e.data() == by_f.data() && by_e.extents() == by_f.extents() && by_e.strides() == by_f.strides()}
      .run(threads);
}

}  // namespace attn::inline ATTN_ISA
