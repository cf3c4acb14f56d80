#pragma once
// The own block of keys and the earlier ones whose means a query matches best (MoBA, Lu 2025), written as its
// definition. The choice is a constant: it has no gradient.
#include <algorithm>

#include "reference/pattern.hpp"

namespace reference {

template <class N>
struct basic_topk_blocks_options : basic_softmax_options<N> {
  index block = 128, topk = 3;
};
using topk_blocks_options = basic_topk_blocks_options<double>;

template <class N>
void copy_choices(const topk_blocks_options& from, basic_topk_blocks_options<N>& to) {
  copy_choices(static_cast<const softmax_options&>(from), static_cast<basic_softmax_options<N>&>(to));
  to.block = from.block, to.topk = from.topk;
}

// q . mean of the keys of a block; what is not a number is less than all numbers.
template <class N>
double block_match(const tensor<N>& q, const tensor<N>& k, index b, index h, index i, index block, index n) {
  const index kv_head = h / (q.heads() / k.heads());
  double match = 0;
  for (index d = 0; d < q.dim(); ++d) {
    double sum = 0;
    for (index j = n * block; j < (n + 1) * block; ++j) sum += static_cast<double>(k(b, kv_head, j, d));
    match += static_cast<double>(q(b, h, i, d)) * (sum / static_cast<double>(block));
  }
  return std::isnan(match) ? -infinity : match;
}

// The blocks before `own`, the best match first; of equals the earlier one.
struct ranked_block {
  double match;
  index block;
};
template <class N>
std::vector<ranked_block> ranked_blocks(const tensor<N>& q, const tensor<N>& k, index b, index h, index i, index block,
                                        index own) {
  std::vector<ranked_block> list;
  for (index n = 0; n < own; ++n) list.push_back({block_match(q, k, b, h, i, block, n), n});
  std::stable_sort(list.begin(), list.end(), [](const auto& x, const auto& y) { return x.match > y.match; });
  return list;
}

// How near the best block that is not chosen comes to the last that is: rounding must not decide.
inline double topk_gap(const tensor<double>& q, const tensor<double>& k, const topk_blocks_options& o) {
  double gap = infinity;
  for (index b = 0; b < q.batch(); ++b) {
    const index queries = true_length(o.lengths, o.query_lengths, b, q.length());
    const index keys = true_length(o.lengths, o.key_lengths, b, k.length());
    for (index h = 0; h < q.heads(); ++h)
      for (index i = std::max<index>(0, queries - keys); i < queries; ++i) {
        const index own = block_of(i + keys - queries, o.block);
        if (own < o.topk || o.topk == 1) continue;
        const auto list = ranked_blocks(q, k, b, h, i, o.block, own);
        gap = std::min(gap, list[static_cast<std::size_t>(o.topk - 2)].match -
                                list[static_cast<std::size_t>(o.topk - 1)].match);
      }
  }
  return gap;
}

template <class N>
basic_result<N> topk_blocks(const tensor<N>& q, const tensor<N>& k, const tensor<N>& v,
                            const basic_topk_blocks_options<N>& o) {
  basic_result<N> into = empty_result(q, v);
  for (index b = 0; b < q.batch(); ++b) {
    const index queries = true_length(o.lengths, o.query_lengths, b, q.length());
    const index keys = true_length(o.lengths, o.key_lengths, b, k.length());
    const index block = std::min(o.block, std::max<index>(1, keys));  // a longer one means the same
    for (index h = 0; h < q.heads(); ++h)
      for (index i = std::max<index>(0, queries - keys); i < queries; ++i) {
        const index position = i + keys - queries, own = position / block;
        std::vector<index> seen;
        const auto list = ranked_blocks(q, k, b, h, i, block, own);
        for (index n = 0; n < std::min(o.topk - 1, own); ++n)
          for (index j = 0; j < block; ++j) seen.push_back(list[static_cast<std::size_t>(n)].block * block + j);
        for (index j = own * block; j <= position; ++j) seen.push_back(j);
        std::vector<N> scores;
        for (index j : seen) {
          scores.push_back(plain_score(o, q, k, b, h, i, j, position - j));
          if (o.score) scores.back() = o.score(scores.back(), b, h, position, j);
        }
        softmax_row(o, scores, seen, v, b, h, i, into);
      }
  }
  return into;
}

}  // namespace reference
