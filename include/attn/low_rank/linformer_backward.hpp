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
//          and F, nor to those of keys that key_mask hides, whose dk and dv are 0.
// Cost     2 rank Lq (3 D + 2 Dv) + 6 rank Lk (D + Dv) operations per head. Scratch: what the forward call takes, the
//          gradients of E and F in the compute type, and, per head, 3 + n times rank (D + Dv) numbers, n = Lq / 1024
//          from 1 to 16.
// Throws   std::invalid_argument for shapes or options that do not fit, for gradients that share memory with an input
//          or one another, before anything is written.
#pragma once

#include <attn/low_rank/detail/linformer_backward_call.hpp>

namespace attn { inline namespace ATTN_ISA {

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
  const tensor_view<const S, 3> by_e = detail::projection_view<S>(e), by_f = detail::projection_view<S>(f);
  auto call = detail::checked_backward_call<linformer_options>("linformer_backward", q, k, v, out, d_out, gradients,
                                                               options, exec);
  const detail::attention_shape& s = call.shape;
  detail::check_softmax_numbers(call.views, s, call.options);
  detail::check_key_options(call.views, s, call.options);
  detail::check_projections(call.views, s, by_e, by_f);
  call.views.gradient("e", gradients.e, by_e);
  call.views.gradient("f", gradients.f, by_f);
  if (s.heads == 0) {
    if (!gradients.accumulate)
      for (const tensor_view<S, 3>& x : {gradients.e, gradients.f})
        detail::clear_gradient(tensor_view<S>(x.data(), {1, x.extent(0), x.extent(1), x.extent(2)},
                                              {0, x.stride(0), x.stride(1), x.stride(2)}));
    return;
  }

  const detail::key_flags seen(call.options.key_mask);
  const detail::seen_lengths lengths(call.options.key_mask, s.batch, call.lengths, call.exec);
  const auto heads = [&](const auto& projection) { return projection.extent(0) == 1 ? s.kv_heads : s.heads; };
  detail::linformer_backward_call<S>{.views = call,
                                     .d_out = as_view(d_out),
                                     .d_lse = gradients.d_lse,
                                     .dq = gradients.q,
                                     .accumulate = gradients.accumulate,
                                     .terms = detail::terms_of_sums<T>(call.options, s.dim),
                                     .keys = {.e = by_e, .x = call.k, .heads = heads(by_e), .seen = seen},
                                     .values = {.e = by_f, .x = call.v, .heads = heads(by_f), .seen = seen},
                                     .key_gradients = {.e = gradients.e, .x = gradients.k},
                                     .value_gradients = {.e = gradients.f, .x = gradients.v},
                                     .shared = detail::shared_projection(by_e, by_f)}
      .run(call.exec);
}

}}  // namespace attn::ATTN_ISA
