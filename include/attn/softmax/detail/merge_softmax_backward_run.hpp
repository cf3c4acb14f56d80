// attn: the driver of merge_softmax_backward.
#pragma once

#include <attn/core/detail/attention_shape.hpp>
#include <attn/core/detail/gradients.hpp>

#include <cmath>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct merge_softmax_gradients;

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

template <class S, class T = compute_type<S>>
void run_merge_softmax_backward(const tensor_view<const S>& mine, const tensor_view<const T, 3>& lse,
                                const tensor_view<const S>& theirs, const tensor_view<const T, 3>& other_lse,
                                const tensor_view<const S>& d, const merge_softmax_gradients<S>& g) {
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
          if (g.out) store_gradient(g.out(b, h, i, e), times(w, d_e), g.accumulate);
          if (g.other_out) store_gradient(g.other_out(b, h, i, e), times(other_w, d_e), g.accumulate);
        }
        change *= w * other_w;
        if (g.lse) store_gradient(g.lse(b, h, i), times(w, d_row) + change, g.accumulate);
        if (g.other_lse) store_gradient(g.other_lse(b, h, i), times(other_w, d_row) - change, g.accumulate);
      }
}

}  // namespace detail
}}  // namespace attn::ATTN_ISA
