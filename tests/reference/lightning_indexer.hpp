#pragma once
// What scores highest by I(t, s) = sum_h w[t, h] act(scale q_h,t . k_s): keys, or blocks of keys, for all heads together
// or for each; and I itself.
#include <algorithm>
#include <numeric>

#include "reference/softmax.hpp"

namespace reference {

template <class N>
struct basic_indexer_options {
  std::optional<double> scale;
  bool causal = false, relu = true;
  std::vector<idx_t> lengths, query_lengths, key_lengths;
  std::vector<idx_t> first_position;  // one, or one for each item
  idx_t span = 1, topk = 1, block = 1, local_blocks = 0, first_blocks = 0;
  bool per_head = false, tail = false;
  tensor<N> w;  // [1, B, Lq, HI], or none
};
using indexer_options = basic_indexer_options<double>;

// Of one head, or of all with head = -1.
template <class N>
N index_score(const tensor<N>& q, const tensor<N>& k, const basic_indexer_options<N>& o, idx_t b, idx_t t, idx_t s,
              idx_t head = -1) {
  N sum = 0;
  for (idx_t h = head < 0 ? 0 : head; h < (head < 0 ? q.heads() : head + 1); ++h) {
    N dot = 0;
    for (idx_t d = 0; d < q.dim(); ++d) dot += q(b, h, t, d) * k(b, 0, s, d);
    N z = dot * o.scale.value_or(1 / std::sqrt(static_cast<double>(q.dim())));
    if (o.relu && static_cast<double>(z) <= 0) z = 0;
    sum += o.w.empty() ? z : o.w(0, b, t, h) * z;
  }
  return sum;
}

// Where query t is, and how many keys it sees.
template <class N>
idx_t index_position(const basic_indexer_options<N>& o, idx_t b, idx_t t, idx_t queries, idx_t keys) {
  const auto& first = o.first_position;
  return t + (first.empty() ? keys - queries : first[first.size() == 1 ? 0 : static_cast<std::size_t>(b)]);
}
template <class N>
idx_t index_end(const basic_indexer_options<N>& o, idx_t position, idx_t keys) {
  idx_t seen = 0;
  while (seen < keys && (!o.causal || (seen + 1) * o.span - 1 <= position)) ++seen;
  return seen;
}

// The key of block `name` that scores highest among those that are seen, the earliest of equals.
template <class N>
idx_t best_of_block(const tensor<N>& q, const tensor<N>& k, const basic_indexer_options<N>& o, idx_t b, idx_t t,
                    idx_t name, idx_t seen, idx_t head) {
  idx_t best = name * o.block;
  double most = -infinity;
  for (idx_t s = best; s < std::min((name + 1) * o.block, seen); ++s)
    if (const double x = static_cast<double>(index_score(q, k, o, b, t, s, head)); x > most) most = x, best = s;
  return best;
}

// [B, 1 or HI, Lq, topk (+ 1)], ascending, -1 behind. Of equals the earlier; what is not a number counts as -infinity.
inline tensor<idx_t> lightning_indexer(const tensor<double>& q, const tensor<double>& k, const indexer_options& o) {
  tensor<idx_t> indices(q.batch(), o.per_head ? q.heads() : 1, q.length(), o.topk + o.tail, -1);
  for (idx_t b = 0; b < q.batch(); ++b)
    for (idx_t list = 0; list < indices.heads(); ++list) {
      const idx_t queries = true_length(o.lengths, o.query_lengths, b, q.length());
      const idx_t keys = true_length(o.lengths, o.key_lengths, b, k.length());
      for (idx_t t = 0; t < queries; ++t) {
        const idx_t position = index_position(o, b, t, queries, keys), seen = index_end(o, position, keys);
        const idx_t own = position >= 0 ? position / o.block : -1 - (-1 - position) / o.block;
        std::vector<double> scores;
        for (idx_t c = 0; c * o.block < seen; ++c) {
          const bool forced = c < o.first_blocks || (c <= own && c > own - o.local_blocks);
          double most = -infinity;
          for (idx_t s = c * o.block; s < std::min((c + 1) * o.block, seen); ++s) {
            const double x = index_score(q, k, o, b, t, s, o.per_head ? list : -1);
            if (x > most) most = x;
          }
          scores.push_back(forced ? infinity : most);
        }
        std::vector<idx_t> order(scores.size());
        std::iota(order.begin(), order.end(), idx_t(0));
        std::stable_sort(order.begin(), order.end(), [&](idx_t x, idx_t y) {
          return scores[static_cast<std::size_t>(x)] > scores[static_cast<std::size_t>(y)];
        });
        order.resize(std::min(order.size(), static_cast<std::size_t>(o.topk)));
        std::sort(order.begin(), order.end());
        if (o.tail && position >= 0 && (position + 1) % o.span != 0) order.push_back((position + 1) / o.span);
        std::copy(order.begin(), order.end(), &indices(b, list, t, 0));
      }
    }
  return indices;
}

}  // namespace reference
