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

#include <attn/core/detail/attention_shape.hpp>
#include <attn/core/detail/gradients.hpp>
#include <attn/core/view_field.hpp>

#include <cmath>

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

namespace detail {

template <class S>
void check_merge_backward(const tensor_view<const S>& out, const tensor_view<const compute_type<S>, 3>& lse,
                          const tensor_view<const S>& other_out, const tensor_view<const compute_type<S>, 3>& other_lse,
                          const tensor_view<const S>& d_out, const merge_softmax_gradients<S>& g) {
  call_views views("merge_softmax_backward");
  views.gradient("out", g.out, out);
  views.gradient("lse", g.lse, lse);
  views.gradient("other_out", g.other_out, other_out);
  views.gradient("other_lse", g.other_lse, other_lse);
  views.read("out", out);
  views.read_like("other_out", other_out, "out", out);
  views.read_like("d_out", d_out, "out", out);
  const tensor_view<const S, 3> rows(nullptr, {out.extent(0), out.extent(1), out.extent(2)});
  views.read_like("lse", lse, "the rows of out", rows);
  views.read_like("other_lse", other_lse, "the rows of out", rows);
  if (g.d_lse) views.read_like("d_lse", g.d_lse, "the rows of out", rows);
}

}  // namespace detail

/// The gradients of merge_softmax. See the top of the file.
template <viewable O, viewable P, viewable D, class Rows = tensor_view<const compute_type<element_of<const O&>>, 3>>
void merge_softmax_backward(const O& out, std::type_identity_t<Rows> lse, const P& other_out,
                            std::type_identity_t<Rows> other_lse, const D& d_out,
                            const merge_softmax_gradients<element_of<const O&>>& gradients) {
  using S = element_of<const O&>;
  using T = compute_type<S>;
  detail::require_one_element_type<const O&, const P&, const D&, tensor_view<S>>();
  const tensor_view<const S> mine = as_view(out), theirs = as_view(other_out), d = as_view(d_out);
  const merge_softmax_gradients<S>& g = gradients;
  detail::check_merge_backward<S>(mine, lse, theirs, other_lse, d, g);

  const auto times = [](T weight, T x) { return weight == T(0) ? T(0) : weight * x; };  // 0 even if x is NaN
  constexpr T unseen = -std::numeric_limits<T>::infinity();
  for (idx_t b = 0; b < mine.extent(0); ++b)
    for (idx_t h = 0; h < mine.extent(1); ++h)
      for (idx_t i = 0; i < mine.extent(2); ++i) {
        const T x = lse(b, h, i), y = other_lse(b, h, i), highest = x < y ? y : x;
        const T part = x == unseen ? T(0) : std::exp(x - highest);
        const T other_part = y == unseen ? T(0) : std::exp(y - highest);
        const T sum = part + other_part, normal = sum == T(0) ? T(0) : T(1) / sum;
        const T w = part * normal, other_w = other_part * normal, d_row = g.d_lse ? g.d_lse(b, h, i) : T(0);
        T change = 0;  // d_out . (out - other_out), where both have seen keys
        for (idx_t e = 0; e < mine.extent(3); ++e) {
          const T d_e = static_cast<T>(d(b, h, i, e));
          if (w != T(0) && other_w != T(0))
            change += d_e * (static_cast<T>(mine(b, h, i, e)) - static_cast<T>(theirs(b, h, i, e)));
          if (g.out) detail::store_gradient(g.out(b, h, i, e), times(w, d_e), g.accumulate);
          if (g.other_out) detail::store_gradient(g.other_out(b, h, i, e), times(other_w, d_e), g.accumulate);
        }
        change *= w * other_w;
        if (g.lse) detail::store_gradient(g.lse(b, h, i), times(w, d_row) + change, g.accumulate);
        if (g.other_lse) detail::store_gradient(g.other_lse(b, h, i), times(other_w, d_row) - change, g.accumulate);
      }
}

}}  // namespace attn::ATTN_ISA
