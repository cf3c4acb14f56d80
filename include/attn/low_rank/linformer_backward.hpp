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
// Throws   as the forward call, and for gradients in memory of an input or of another gradient.
#pragma once

#include <attn/low_rank/detail/linformer_backward_run.hpp>
#include <attn/low_rank/linformer.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct linformer_gradients {
  using real = compute_type<S>;

  view_field<S> q{}, k{}, v{};
  view_field<S, 3> e{}, f{};  // [H or 1, rank, Lk], as the projections
  view_field<const real, 3> d_lse{};  // read, not written: the gradient of lse, [B, H, Lq]
  bool accumulate = false;  // add to what is there instead of writing it over
};

template <viewable Q, viewable K, viewable V, viewable O, viewable E, viewable F, viewable D,
          class Options = linformer_options<element_of<const Q&>>>
void linformer_backward(const Q& q, const K& k, const V& v, const O& out, const E& e, const F& f, const D& d_out,
                        const linformer_gradients<element_of<const Q&>>& gradients, Options&& options = {},
                        execution_ref exec = {}) {
  using S = element_of<const Q&>;
  const tensor_view<const S, 3> by_e = detail::projection_view<S>(e), by_f = detail::projection_view<S>(f);
  auto call = detail::checked_backward_call<linformer_options>("linformer_backward", q, k, v, out, d_out, gradients,
                                                               options, exec);
  const detail::attention_shape& s = call.shape;
  const auto given = detail::parameters_of<S>(call.options);
  detail::check_softmax_options(call.views, s, given);
  detail::check_projections(call.views, s, by_e, by_f);
  call.views.gradient("e", gradients.e, by_e);
  call.views.gradient("f", gradients.f, by_f);
  const detail::seen_lengths lengths(call.options.key_mask, s.batch, call.lengths, call.exec);
  const detail::linformer_backward_call<S> checked{
      .forward = {call, by_e, by_f, detail::terms_of_sums(given, s.dim), call.options.key_mask},
      .d_out = as_view(d_out), .d_lse = gradients.d_lse, .dq = gradients.q, .dk = gradients.k, .dv = gradients.v,
      .de = gradients.e, .df = gradients.f, .accumulate = gradients.accumulate};
  detail::run_linformer_backward(checked, call.exec);
}

}}  // namespace attn::ATTN_ISA
