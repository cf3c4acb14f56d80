#pragma once
// DeepSeek's layer of latent attention: keys and values of every head are made from the latents, then attended by full
// softmax. Tensors as in reference/layers.hpp.
#include "reference/latent_attention.hpp"
#include "reference/layers.hpp"

namespace reference {

template <class N>
struct basic_multi_head_latent_weights {
  // Either query or query_down and query_up; norms and output may be empty.
  tensor<N> query, query_down, q_norm, query_up, latent, latent_norm, latent_up, output;
};

// Numbers [begin, begin + count) of every row.
template <class N>
tensor<N> columns(const tensor<N>& x, idx_t begin, idx_t count) {
  tensor<N> part(x.batch(), x.heads(), x.length(), count);
  for (idx_t b = 0; b < x.batch(); ++b)
    for (idx_t h = 0; h < x.heads(); ++h)
      for (idx_t i = 0; i < x.length(); ++i)
        for (idx_t d = 0; d < count; ++d) part(b, h, i, d) = x(b, h, i, begin + d);
  return part;
}

template <class N>
tensor<N> multi_head_latent(const tensor<N>& x, const basic_multi_head_latent_weights<N>& w, idx_t heads,
                            const basic_full_softmax_options<N>& options, const head_rotation& rotation,
                            double norm_eps = 1e-6) {
  const idx_t rank = w.latent_up.dim(), shared = w.latent.length() - rank;
  const auto normed = [&](const tensor<N>& y, const tensor<N>& gamma) {
    return gamma.empty() ? y : rms_norm(y, gamma, norm_eps);
  };
  const tensor<N> queries = split(w.query.empty() ? project(normed(project(x, w.query_down), w.q_norm), w.query_up)
                                                  : project(x, w.query),
                                  heads);
  const idx_t own = queries.dim() - shared;
  const tensor<N> rows = project(x, w.latent);
  const tensor<N> keys_and_values = split(project(normed(columns(rows, 0, rank), w.latent_norm), w.latent_up), heads);
  const tensor<N> q = joined(columns(queries, 0, own), rotated_heads(columns(queries, own, shared), rotation));
  const tensor<N> k =
      joined(columns(keys_and_values, 0, own), rotated_heads(columns(rows, rank, shared), rotation));
  const tensor<N> v = columns(keys_and_values, own, keys_and_values.dim() - own);
  const tensor<N> out = merge(full_softmax(q, k, v, options).out);
  return w.output.empty() ? out : project(out, w.output);
}

}  // namespace reference
