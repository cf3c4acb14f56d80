#pragma once
// Pooled tokens: x and logits [B, H, L, C], bias [H or 1, window, C] as [1, H or 1, window, C]; the last two may be
// empty. Numbers are of type N: double, or reference::variable (variable.hpp).
#include "reference/layers.hpp"

namespace reference {

struct pooled_tokens_options {
  idx_t window = 1;
  bool overlap = false;
  std::vector<idx_t> lengths{};
};

template <class N>
tensor<N> pooled_tokens(const tensor<N>& x, const tensor<N>& logits, const tensor<N>& bias,
                        const pooled_tokens_options& o) {
  using std::exp;
  const idx_t m = o.window, dim = o.overlap ? x.dim() / 2 : x.dim();
  tensor<N> out(x.batch(), x.heads(), x.length() / m, dim, N(0));
  for (idx_t b = 0; b < x.batch(); ++b)
    for (idx_t h = 0; h < x.heads(); ++h)
      for (idx_t w = 0; w < (o.lengths.empty() ? x.length() : o.lengths[static_cast<std::size_t>(b)]) / m; ++w)
        for (idx_t c = 0; c < dim; ++c) {
          N sum(0), mean(0);
          const auto add = [&](idx_t first, idx_t channel) {
            for (idx_t j = first; j < first + m; ++j) {
              N z(0);
              if (!logits.empty()) z += logits(b, h, j, channel);
              if (!bias.empty()) z += bias(0, bias.heads() == 1 ? 0 : h, j - first, channel);
              const N weight = exp(z);
              sum += weight, mean += weight * x(b, h, j, channel);
            }
          };
          if (o.overlap && w > 0) add((w - 1) * m, c);
          add(w * m, o.overlap ? dim + c : c);
          out(b, h, w, c) = mean / sum;
        }
  return out;
}

}  // namespace reference
