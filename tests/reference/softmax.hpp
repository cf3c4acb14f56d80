#pragma once
// What the oracles of the exact operators share. They are written to be read, in double, with plain
// loops and no code of the library; padding and unseen keys are never read.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>
#include <optional>

#include "support/tensor.hpp"

namespace reference {

using testing::index;
using testing::tensor;

inline constexpr double infinity = std::numeric_limits<double>::infinity();

// (score, batch, head, row of q, row of k) -> score
using score_function = std::function<double(double, index, index, index, index)>;

struct softmax_options {
  std::optional<double> scale;
  bool causal = false;
  std::vector<index> lengths, query_lengths, key_lengths;
  std::optional<double> softcap;
  std::vector<double> alibi_slopes, sinks;
  score_function score;
};

struct result {
  tensor<double> out;
  tensor<double> lse;  // [batch, head, length, 1]
};

// Zeros and −infinity: what rows of padding and rows without a key keep.
inline result empty_result(const tensor<double>& q, const tensor<double>& v) {
  return {tensor<double>(q.batch(), q.heads(), q.length(), v.dim()),
          tensor<double>(q.batch(), q.heads(), q.length(), 1, -infinity)};
}

inline index true_length(const std::vector<index>& both, const std::vector<index>& one, index b, index extent) {
  if (!both.empty()) return both[static_cast<std::size_t>(b)];
  return one.empty() ? extent : one[static_cast<std::size_t>(b)];
}

// The score of query row i and key row j, which stand `distance` positions apart, but for the bias
// and the caller's own function.
inline double plain_score(const softmax_options& options, const tensor<double>& q, const tensor<double>& k, index b,
                          index h, index i, index j, index distance) {
  const index kv_head = h / (q.heads() / k.heads());
  double dot = 0;
  for (index d = 0; d < q.dim(); ++d) dot += q(b, h, i, d) * k(b, kv_head, j, d);
  double score = dot * options.scale.value_or(1 / std::sqrt(static_cast<double>(q.dim())));
  if (options.softcap) score = *options.softcap * std::tanh(score / *options.softcap);
  if (!options.alibi_slopes.empty())
    score -= options.alibi_slopes[static_cast<std::size_t>(h)] * static_cast<double>(std::abs(distance));
  return score;
}

// Row i of the result from the scores of the keys it sees. A score of −infinity hides its key.
inline void softmax_row(const softmax_options& options, const std::vector<double>& scores,
                        const std::vector<index>& keys, const tensor<double>& v, index b, index h, index i,
                        result& into) {
  double largest = -infinity;
  for (double score : scores) largest = score > largest || std::isnan(score) ? score : largest;
  if (largest == -infinity) return;
  if (!options.sinks.empty()) largest = std::max(largest, options.sinks[static_cast<std::size_t>(h)]);

  double denominator = 0;
  for (double score : scores) denominator += std::exp(score - largest);
  if (!options.sinks.empty()) denominator += std::exp(options.sinks[static_cast<std::size_t>(h)] - largest);

  const index kv_head = h / (into.out.heads() / v.heads());
  for (std::size_t n = 0; n < keys.size(); ++n) {
    if (scores[n] == -infinity) continue;
    const double weight = std::exp(scores[n] - largest) / denominator;
    for (index d = 0; d < v.dim(); ++d) into.out(b, h, i, d) += weight * v(b, kv_head, keys[n], d);
  }
  into.lse(b, h, i, 0) = largest + std::log(denominator);
}

}  // namespace reference
