#pragma once
// softmax(s Q (E K)ᵀ)(F V), projections over the true keys only, of those that are seen (Wang 2020).
#include "reference/softmax.hpp"

namespace reference {

template <class N>
struct basic_linformer_options : basic_softmax_options<N> {
  tensor<N> e, f;  // [1, H|1, rank, Lk]
};
using linformer_options = basic_linformer_options<double>;

// Row r of item b and query head h: Σ_j e_rj x_j over those of the first `length` tokens that are seen.
template <class N>
tensor<N> projected(const tensor<N>& e, const tensor<N>& x, idx_t b, idx_t h, idx_t heads, idx_t length,
                    const tensor<double>& key_mask) {
  tensor<N> to(1, 1, e.length(), x.dim());
  for (idx_t r = 0; r < e.length(); ++r)
    for (idx_t d = 0; d < x.dim(); ++d)
      for (idx_t j = 0; j < length; ++j)
        if (!key_hidden(key_mask, b, j)) to(0, 0, r, d) += e.broadcast(0, h, r, j) * x(b, h / (heads / x.heads()), j, d);
  return to;
}

template <class N>
basic_result<N> linformer(const tensor<N>& q, const tensor<N>& k, const tensor<N>& v,
                          const basic_linformer_options<N>& options) {
  basic_result<N> into = empty_result(q, v);
  basic_softmax_options<N> of_rows = options;  // which are no keys
  of_rows.key_mask = {};
  for (idx_t b = 0; b < q.batch(); ++b) {
    const idx_t queries = true_length(options.lengths, options.query_lengths, b, q.length());
    const idx_t keys = true_length(options.lengths, options.key_lengths, b, k.length());
    idx_t hidden = 0;
    for (idx_t j = 0; j < keys; ++j) hidden += key_hidden(options.key_mask, b, j);
    if (hidden == keys) continue;
    for (idx_t h = 0; h < q.heads(); ++h) {
      const tensor<N> few_keys = projected(options.e, k, b, h, q.heads(), keys, options.key_mask);
      const tensor<N> few_values = projected(options.f, v, b, h, q.heads(), keys, options.key_mask);
      basic_result<N> row{tensor<N>(1, 1, 1, v.dim()), tensor<N>(1, 1, 1, 1)};
      for (idx_t i = 0; i < queries; ++i) {
        tensor<N> query(1, 1, 1, q.dim());
        for (idx_t d = 0; d < q.dim(); ++d) query(0, 0, 0, d) = q(b, h, i, d);
        std::vector<N> scores;
        std::vector<idx_t> seen;
        for (idx_t r = 0; r < few_keys.length(); ++r) {
          scores.push_back(plain_score(of_rows, query, few_keys, 0, 0, 0, r, 0));
          seen.push_back(r);
        }
        row.out.data.assign(row.out.data.size(), N(0));
        softmax_row(of_rows, scores, seen, few_values, 0, 0, 0, row);
        for (idx_t d = 0; d < v.dim(); ++d) into.out(b, h, i, d) = row.out(0, 0, 0, d);
        into.lse(b, h, i, 0) = row.lse(0, 0, 0, 0);
      }
    }
  }
  return into;
}

}  // namespace reference
