#pragma once
// out_i = Σ_j softmax_j(score_ij) v_j over every real key (Vaswani 2017).
#include "reference/softmax.hpp"

namespace reference {

struct full_softmax_options : softmax_options {
  tensor<double> bias;  // [B|1, H|1, Lq|1, Lk]
};

inline result full_softmax(const tensor<double>& q, const tensor<double>& k, const tensor<double>& v,
                           const full_softmax_options& options = {}) {
  result into = empty_result(q, v);
  for (index b = 0; b < q.batch(); ++b) {
    const index queries = true_length(options.lengths, options.query_lengths, b, q.length());
    const index keys = true_length(options.lengths, options.key_lengths, b, k.length());
    for (index h = 0; h < q.heads(); ++h)
      for (index i = 0; i < queries; ++i) {
        const index position = i + keys - queries;
        std::vector<double> scores;
        std::vector<index> seen;
        for (index j = 0; j < keys; ++j) {
          if (options.causal && j > position) continue;
          const double bias = options.bias.empty() ? 0 : options.bias.broadcast(b, h, i, j);
          if (bias == -infinity) continue;
          double score = plain_score(options, q, k, b, h, i, j, position - j) + bias;
          if (options.score) score = options.score(score, b, h, position, j);
          scores.push_back(score);
          seen.push_back(j);
        }
        softmax_row(options, scores, seen, v, b, h, i, into);
      }
  }
  return into;
}

}  // namespace reference
