// attn: the driver of merge_softmax.
#pragma once

#include <attn/core/detail/attention_shape.hpp>

#include <cmath>

namespace attn { inline namespace ATTN_ISA { namespace detail {
template <class S, class T = compute_type<S>>
void run_merge_softmax(const tensor_view<S>& into, const tensor_view<T, 3>& lse, const tensor_view<const S>& from,
                       const tensor_view<const T, 3>& other_lse) {
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
        S* const x = head_of(into, b, h).row(i);
        const S* const y = head_of(from, b, h).row(i);
        const idx_t stride = into.stride(3), other_stride = from.stride(3);
        if (stride == 1 && other_stride == 1)
          for (idx_t d = 0; d < into.extent(3); ++d) x[d] = merged(x[d], y[d]);
        else
          for (idx_t d = 0; d < into.extent(3); ++d) x[d * stride] = merged(x[d * stride], y[d * other_stride]);
      }
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN(S) void run_merge_softmax(const tensor_view<S>&, const tensor_view<compute_type<S>, 3>&,              \
  const tensor_view<const S>&, const tensor_view<const compute_type<S>, 3>&)
#include <attn/core/detail/compiled.hpp>
