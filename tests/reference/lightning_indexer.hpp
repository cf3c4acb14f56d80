#pragma once
// The keys with the largest I(t, s) = sum_h w[t, h] act(scale q_h,t . k_s), and I itself.
#include <algorithm>
#include <numeric>

#include "reference/softmax.hpp"

namespace reference {

template <class N>
struct basic_indexer_options {
  std::optional<double> scale;
  bool causal = false, relu = true;
  std::vector<idx_t> lengths, query_lengths, key_lengths;
  idx_t topk = 1;
  tensor<N> w;  // [1, B, Lq, HI], or none
};
using indexer_options = basic_indexer_options<double>;

template <class N>
N index_score(const tensor<N>& q, const tensor<N>& k, const basic_indexer_options<N>& o, idx_t b, idx_t t, idx_t s) {
  N sum = 0;
  for (idx_t h = 0; h < q.heads(); ++h) {
    N dot = 0;
    for (idx_t d = 0; d < q.dim(); ++d) dot += q(b, h, t, d) * k(b, 0, s, d);
    N z = dot * o.scale.value_or(1 / std::sqrt(static_cast<double>(q.dim())));
    if (o.relu && static_cast<double>(z) <= 0) z = 0;
    sum += o.w.empty() ? z : o.w(0, b, t, h) * z;
  }
  return sum;
}

// [B, 1, Lq, topk], ascending, -1 behind. Of equals the earlier key; what is not a number counts as -infinity.
inline tensor<idx_t> lightning_indexer(const tensor<double>& q, const tensor<double>& k, const indexer_options& o) {
  tensor<idx_t> indices(q.batch(), 1, q.length(), o.topk, -1);
  for (idx_t b = 0; b < q.batch(); ++b) {
    const idx_t queries = true_length(o.lengths, o.query_lengths, b, q.length());
    const idx_t keys = true_length(o.lengths, o.key_lengths, b, k.length());
    for (idx_t t = 0; t < queries; ++t) {
      const idx_t seen = o.causal ? std::clamp<idx_t>(t + keys - queries + 1, 0, keys) : keys;
      std::vector<double> scores;
      for (idx_t s = 0; s < seen; ++s) {
        const double x = index_score(q, k, o, b, t, s);
        scores.push_back(std::isnan(x) ? -infinity : x);
      }
      std::vector<idx_t> order(scores.size());
      std::iota(order.begin(), order.end(), idx_t(0));
      std::stable_sort(order.begin(), order.end(), [&](idx_t x, idx_t y) {
        return scores[static_cast<std::size_t>(x)] > scores[static_cast<std::size_t>(y)];
      });
      order.resize(static_cast<std::size_t>(std::min(seen, o.topk)));
      std::sort(order.begin(), order.end());
      std::copy(order.begin(), order.end(), &indices(b, 0, t, 0));
    }
  }
  return indices;
}

}  // namespace reference
