// attn: partial results of softmax attention over disjoint sets of keys, merged exactly.
#pragma once

#include <attn/softmax/detail/merge_softmax_run.hpp>

namespace attn { inline namespace ATTN_ISA {

/// (out, lse) becomes the attention over the union of the two key sets:
///   lse' = log(e^lse + e^other_lse),   out' = e^(lse - lse') out + e^(other_lse - lse') other_out
/// Associative; (0, -infinity) is neutral. out, other_out [B, H, L, Dv]; lse, other_lse [B, H, L] as the operators
/// write them; a sink must be in one of the two only. Cost O(B H L Dv), no scratch. Throws std::invalid_argument where
/// shapes differ or a view written shares memory with another.
template <viewable O, viewable P>
void merge_softmax(O&& out, std::type_identity_t<tensor_view<compute_type<element_of<O>>, 3>> lse, const P& other_out,
                   std::type_identity_t<tensor_view<const compute_type<element_of<O>>, 3>> other_lse) {
  using S = element_of<O>;
  detail::require_one_element_type<const P&, const P&, const P&, O>();
  const tensor_view<S> into = as_view(out);
  const tensor_view<const S> from = as_view(other_out);
  const tensor_view<const S, 3> rows(nullptr, {into.extent(0), into.extent(1), into.extent(2)});
  detail::call_views views("merge_softmax");
  views.read_like("other_out", from, "out", into);
  views.read_like("other_lse", other_lse, "the rows of out", rows);
  views.write("out", into), views.write("lse", lse);
  detail::check_same_shape(views, "lse", lse, "the rows of out", rows);
  detail::run_merge_softmax<S>(into, lse, from, other_lse);
}

}}  // namespace attn::ATTN_ISA
