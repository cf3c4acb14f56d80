#pragma once
// Softmax over the keys of a query's own block up to its position, and of the topk - 1 earlier blocks with the largest
// q . mean of their keys (MoBA, Lu 2025). Of equals the earlier block is chosen; what is not a number comes last.
#include <algorithm>
#include <numeric>

#include "reference/softmax.hpp"

namespace reference {

template <class N>
struct basic_topk_blocks_options : basic_softmax_options<N> {
  idx_t block = 128, topk = 3;
};
using topk_blocks_options = basic_topk_blocks_options<double>;

template <class N>
void copy_choices(const topk_blocks_options& from, basic_topk_blocks_options<N>& to) {
  copy_choices(static_cast<const softmax_options&>(from), static_cast<basic_softmax_options<N>&>(to));
  to.block = from.block, to.topk = from.topk;
}

// What a choice is made by: constants, for it has no gradient.
template <class N>
struct block_matches {
  const tensor<N>& q;
  idx_t block;
  tensor<double> sums, sizes;  // of the keys of every complete block, and of their absolute values

  block_matches(const tensor<N>& queries, const tensor<N>& k, idx_t keys, idx_t b, idx_t kv_head, idx_t block_size)
      : q(queries), block(block_size), sums(1, 1, keys / block, k.dim()), sizes(sums) {
    for (idx_t c = 0; c < sums.length(); ++c)
      for (idx_t j = c * block; j < (c + 1) * block; ++j)
        for (idx_t d = 0; d < k.dim(); ++d) {
          const double key = static_cast<double>(k(b, kv_head, j, d));
          sums(0, 0, c, d) += key, sizes(0, 0, c, d) += std::abs(key);
        }
  }

  // q_i . mean of block c. Divided at the end, so that it is exact where sums are.
  double match(idx_t b, idx_t h, idx_t i, idx_t c) const {
    double dot = 0;
    for (idx_t d = 0; d < q.dim(); ++d) dot += static_cast<double>(q(b, h, i, d)) * sums(0, 0, c, d);
    return dot / static_cast<double>(block);
  }
  double size(idx_t b, idx_t h, idx_t i, idx_t c) const {
    double dot = 0;
    for (idx_t d = 0; d < q.dim(); ++d) dot += std::abs(static_cast<double>(q(b, h, i, d))) * sizes(0, 0, c, d);
    return dot / static_cast<double>(block);
  }
  // The first `earlier` blocks, best first.
  std::vector<idx_t> ranked(idx_t b, idx_t h, idx_t i, idx_t earlier) const {
    std::vector<double> matches;
    for (idx_t c = 0; c < earlier; ++c) matches.push_back(match(b, h, i, c));
    std::vector<idx_t> order(matches.size());
    std::iota(order.begin(), order.end(), idx_t(0));
    std::stable_sort(order.begin(), order.end(), [&](idx_t x, idx_t y) {
      const double a = matches[static_cast<std::size_t>(x)], other = matches[static_cast<std::size_t>(y)];
      return a > other || (!std::isnan(a) && std::isnan(other));
    });
    return order;
  }
};

// How near the best block that is left out comes to the last one chosen, relative to the sum of the products' absolute
// terms: rounding must not decide.
inline double topk_gap(const tensor<double>& q, const tensor<double>& k, const topk_blocks_options& o) {
  double gap = infinity;
  for (idx_t b = 0; b < q.batch(); ++b) {
    const idx_t queries = true_length(o.lengths, o.query_lengths, b, q.length());
    const idx_t keys = true_length(o.lengths, o.key_lengths, b, k.length());
    for (idx_t h = 0; h < q.heads() && o.topk > 1; ++h) {
      const block_matches<double> blocks(q, k, keys, b, h / (q.heads() / k.heads()), o.block);
      for (idx_t i = 0; i < queries; ++i) {
        const idx_t position = i + keys - queries;
        if (position < 0 || position / o.block <= o.topk - 1) continue;
        const std::vector<idx_t> order = blocks.ranked(b, h, i, position / o.block);
        const auto last = order.begin() + (o.topk - 2);
        const double size = std::max(blocks.size(b, h, i, last[0]), blocks.size(b, h, i, last[1]));
        if (size > 0) gap = std::min(gap, (blocks.match(b, h, i, last[0]) - blocks.match(b, h, i, last[1])) / size);
      }
    }
  }
  return gap;
}

template <class N>
basic_result<N> topk_blocks(const tensor<N>& q, const tensor<N>& k, const tensor<N>& v,
                            const basic_topk_blocks_options<N>& o) {
  basic_result<N> into = empty_result(q, v);
  for (idx_t b = 0; b < q.batch(); ++b) {
    const idx_t queries = true_length(o.lengths, o.query_lengths, b, q.length());
    const idx_t keys = true_length(o.lengths, o.key_lengths, b, k.length());
    for (idx_t h = 0; h < q.heads(); ++h) {
      const block_matches<N> blocks(q, k, keys, b, h / (q.heads() / k.heads()), o.block);
      for (idx_t i = 0; i < queries; ++i) {
        const idx_t position = i + keys - queries;
        if (position < 0) {
          softmax_row(o, std::vector<N>(), {}, v, b, h, i, into);
          continue;
        }
        const idx_t own = position / o.block;
        std::vector<idx_t> chosen = blocks.ranked(b, h, i, own);
        if (std::ssize(chosen) > o.topk - 1) chosen.resize(static_cast<std::size_t>(o.topk - 1));
        std::sort(chosen.begin(), chosen.end());
        std::vector<idx_t> seen;
        for (idx_t c : chosen)
          for (idx_t j = c * o.block; j < (c + 1) * o.block; ++j) seen.push_back(j);
        for (idx_t j = own * o.block; j <= position; ++j) seen.push_back(j);
        std::vector<N> scores;
        for (idx_t j : seen) {
          N score = plain_score(o, q, k, b, h, i, j, position - j);
          if (o.score) score = o.score(score, b, h, position, j);
          scores.push_back(score);
        }
        softmax_row(o, scores, seen, v, b, h, i, into);
      }
    }
  }
  return into;
}

}  // namespace reference
