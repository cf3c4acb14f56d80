// attn: the gradients of merge_softmax.
//
//   lse' = log(e^lse + e^other_lse),   w = e^(lse - lse'),   other_w = e^(other_lse - lse')       the merged result:
//   d(out) = w d_out,                  d(lse) = w d_lse + w other_w d_out . (out - other_out)     d_out, d_lse are its
//   d(other_out) = other_w d_out,      d(other_lse) = other_w d_lse + w other_w d_out . (other_out - out)    gradients
//
//   attn::merge_softmax_backward(out, lse, other_out, other_lse, d_out,
//                                {.out = d_part, .lse = d_part_lse, .other_out = d_other, .other_lse = d_other_lse,
//                                 .d_lse = d_lse});
//
// out, lse, other_out and other_lse are the two parts as they were before they were merged: merge_softmax writes the
// result over the first, so keep a copy. A part that has seen no key (lse -infinity) has gradient 0, and its out is not
// read.
//
// Shapes   out, other_out, d_out and their gradients [B, H, L, Dv]; lse, other_lse, d_lse and theirs [B, H, L].
// Cost     O(B H L Dv), no scratch.
// Throws   std::invalid_argument where shapes differ or a gradient shares memory with an input or another gradient,
//          before anything is written.
#pragma once

#include <attn/core/view_field.hpp>
#include <attn/softmax/detail/merge_softmax_backward_run.hpp>

namespace attn { inline namespace ATTN_ISA {

/// The gradients merge_softmax_backward computes: those given. S is the element type of the call.
template <class S>
struct merge_softmax_gradients {
  using real = compute_type<S>;

  view_field<S> out{};
  view_field<real, 3> lse{};
  view_field<S> other_out{};
  view_field<real, 3> other_lse{};
  /// Read, not written: the gradient of the merged lse; 0 unless given.
  view_field<const real, 3> d_lse{};
  /// Add to what is there instead of writing it over.
  bool accumulate = false;
};

/// The gradients of merge_softmax. See the top of the file.
template <viewable O, viewable P, viewable D, class Rows = tensor_view<const compute_type<element_of<const O&>>, 3>>
void merge_softmax_backward(const O& out, std::type_identity_t<Rows> lse, const P& other_out,
                            std::type_identity_t<Rows> other_lse, const D& d_out,
                            const merge_softmax_gradients<element_of<const O&>>& gradients) {
  using S = element_of<const O&>;
  detail::require_one_element_type<const O&, const P&, const D&, tensor_view<S>>();
  const tensor_view<const S> mine = as_view(out), theirs = as_view(other_out), d = as_view(d_out);
  detail::check_merge_backward<S>(mine, lse, theirs, other_lse, d, gradients);
  detail::run_merge_softmax_backward<S>(mine, lse, theirs, other_lse, d, gradients);
}

}}  // namespace attn::ATTN_ISA

#define ATTN_RUN(S) void run_merge_softmax_backward(const tensor_view<const S>&,                                       \
  const tensor_view<const compute_type<S>, 3>&, const tensor_view<const S>&,                                           \
  const tensor_view<const compute_type<S>, 3>&, const tensor_view<const S>&, const merge_softmax_gradients<S>&)
#include <attn/core/detail/compiled.hpp>
