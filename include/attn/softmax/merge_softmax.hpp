// attn: partial results of softmax attention over disjoint sets of keys, merged exactly.
#pragma once

#include <attn/core/detail/attention_shape.hpp>

#include <cmath>

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
  using T = compute_type<S>;
  detail::require_one_element_type<const P&, const P&, const P&, O>();
  const tensor_view<S> into = as_view(out);
  const tensor_view<const S> from = as_view(other_out);
  const idx_t batch = into.extent(0), heads = into.extent(1), length = into.extent(2);
  detail::call_views views("merge_softmax");
  views.read("other_out", from, {{"other_out batch = out batch", batch},
                                 {"other_out heads = out heads", heads},
                                 {"other_out length = out length", length},
                                 {"other_out dim = out dim", into.extent(3)}});
  views.read("other_lse", other_lse, {{"other_lse batch = out batch", batch},
                                      {"other_lse heads = out heads", heads},
                                      {"other_lse length = out length", length}});
  views.write("out", into);
  views.write("lse", lse, {{"lse batch = out batch", batch},
                           {"lse heads = out heads", heads},
                           {"lse length = out length", length}});

  for (idx_t b = 0; b < into.extent(0); ++b)
    for (idx_t h = 0; h < into.extent(1); ++h)
      for (idx_t i = 0; i < into.extent(2); ++i) {
        const T mine = lse(b, h, i), theirs = other_lse(b, h, i);
        if (theirs == -std::numeric_limits<T>::infinity()) continue;
        const T highest = (std::max)(mine, theirs), own = std::exp(mine - highest), others = std::exp(theirs - highest);
        const T sum = own + others;
        lse(b, h, i) = highest + std::log(sum);
        const auto merged = [&](S x, S y) {
          return static_cast<S>((static_cast<T>(x) * own + static_cast<T>(y) * others) / sum);
        };
        S* const x = detail::head_of(into, b, h).row(i);
        const S* const y = detail::head_of(from, b, h).row(i);
        const idx_t stride = into.stride(3), other_stride = from.stride(3);
        if (stride == 1 && other_stride == 1)
          for (idx_t d = 0; d < into.extent(3); ++d) x[d] = merged(x[d], y[d]);
        else
          for (idx_t d = 0; d < into.extent(3); ++d) x[d * stride] = merged(x[d * stride], y[d * other_stride]);
      }
}

}}  // namespace attn::ATTN_ISA
