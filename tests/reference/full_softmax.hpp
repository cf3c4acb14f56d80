#pragma once
// out_i = Σ_j softmax_j(score_ij) v_j over every real key (Vaswani 2017).
#include "reference/softmax.hpp"

namespace reference {

template <class N>
struct basic_full_softmax_options : basic_softmax_options<N> {
  tensor<N> bias;  // [B|1, H|1, Lq|1, Lk]
};
using full_softmax_options = basic_full_softmax_options<double>;

template <class N>
basic_result<N> full_softmax(const tensor<N>& q, const tensor<N>& k, const tensor<N>& v,
                             const basic_full_softmax_options<N>& options = {}) {
  basic_result<N> into = empty_result(q, v);
  for (idx_t b = 0; b < q.batch(); ++b) {
    const idx_t queries = true_length(options.lengths, options.query_lengths, b, q.length());
    const idx_t keys = true_length(options.lengths, options.key_lengths, b, k.length());
    for (idx_t h = 0; h < q.heads(); ++h)
      for (idx_t i = 0; i < queries; ++i) {
        const idx_t position = i + first_of(options, b, queries, keys);
        std::vector<N> scores;
        std::vector<idx_t> seen;
        for (idx_t j = 0; j < keys; ++j) {
          if (hides_later(options, position, j)) continue;
          const N bias = options.bias.empty() ? N(0) : options.bias.broadcast(b, h, i, j);
          if (bias == -infinity) continue;
          N score = plain_score(options, q, k, b, h, i, j, position - j) + bias;
          if (score == -infinity) continue;
          if (options.score) score = options.score(score, b, h, position, j);
          scores.push_back(score);
          seen.push_back(j);
        }
        softmax_row(options, scores, seen, v, b, h, i, into, position);
      }
  }
  return into;
}

}  // namespace reference
