#pragma once
// Keys [W_h c; k_rotary] and values U_h c of every head, then softmax attention over them (DeepSeek-V2, 2024). Weights
// are [1, H, rows, r]; the rotary parts may be empty.
#include "reference/full_softmax.hpp"

namespace reference {

// x with the channels of y behind its own; one head of y serves all. Nothing, where y is empty.
template <class N>
tensor<N> joined(const tensor<N>& x, const tensor<N>& y) {
  if (y.empty()) return x;
  tensor<N> both(x.batch(), x.heads(), x.length(), x.dim() + y.dim());
  for (idx_t b = 0; b < x.batch(); ++b)
    for (idx_t h = 0; h < x.heads(); ++h)
      for (idx_t i = 0; i < x.length(); ++i)
        for (idx_t d = 0; d < both.dim(); ++d)
          both(b, h, i, d) = d < x.dim() ? x(b, h, i, d) : y(b, y.heads() == 1 ? 0 : h, i, d - x.dim());
  return both;
}

// W_h c of every head and token.
template <class N>
tensor<N> made_from_latents(const tensor<N>& latent, const tensor<N>& w) {
  tensor<N> made(latent.batch(), w.heads(), latent.length(), w.length());
  for (idx_t b = 0; b < latent.batch(); ++b)
    for (idx_t h = 0; h < w.heads(); ++h)
      for (idx_t j = 0; j < latent.length(); ++j)
        for (idx_t d = 0; d < w.length(); ++d) {
          N sum = 0;
          for (idx_t e = 0; e < latent.dim(); ++e) sum += w(0, h, d, e) * latent(b, 0, j, e);
          made(b, h, j, d) = sum;
        }
  return made;
}

template <class N>
basic_result<N> latent_attention(const tensor<N>& q, const tensor<N>& q_rotary, const tensor<N>& latent,
                                 const tensor<N>& k_rotary, const tensor<N>& w_key, const tensor<N>& w_value,
                                 const basic_full_softmax_options<N>& options = {}) {
  return full_softmax(joined(q, q_rotary), joined(made_from_latents(latent, w_key), k_rotary),
                      made_from_latents(latent, w_value), options);
}

}  // namespace reference
