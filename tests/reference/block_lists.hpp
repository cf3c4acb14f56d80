#pragma once
// Lists of blocks for selected_keys, chosen without training: by sums along antidiagonals, by vertical and slash lines,
// by the minimum and maximum of a block's keys. [B, lists, Lq, n], ascending, -1 behind; lists: H, or the key heads.
#include <algorithm>
#include <map>
#include <numeric>

#include "reference/softmax.hpp"

namespace reference {

struct block_list_options {
  std::optional<double> scale;
  bool causal = false;
  std::vector<idx_t> lengths, query_lengths, key_lengths;
  std::vector<idx_t> first_position;  // one, or one for each item
  idx_t block = 4, stride = 2, queries = 64, local_blocks = 1, first_blocks = 0;
  double threshold = 1;
};

inline idx_t floor_of(idx_t n, idx_t d) { return n >= 0 ? n / d : -1 - (-1 - n) / d; }

// What a list of n entries names of blocks with these scores: the first and the local ones, then the best until
// `threshold` of the sum is reached.
inline std::vector<idx_t> best_blocks(const std::vector<double>& scores, idx_t own, const block_list_options& o,
                                      idx_t n) {
  std::vector<idx_t> order(scores.size()), named;
  std::iota(order.begin(), order.end(), idx_t(0));
  const auto forced = [&](idx_t c) { return c < o.first_blocks || (c <= own && c > own - o.local_blocks); };
  std::stable_sort(order.begin(), order.end(), [&](idx_t x, idx_t y) {
    if (forced(x) || forced(y)) return forced(x) && !forced(y);
    return scores[static_cast<std::size_t>(x)] > scores[static_cast<std::size_t>(y)];
  });
  const double all = std::accumulate(scores.begin(), scores.end(), 0.0);
  double sum = 0;
  for (idx_t c : order) {
    if (std::ssize(named) == n || (o.threshold < 1 && !forced(c) && sum >= o.threshold * all)) break;
    named.push_back(c), sum += scores[static_cast<std::size_t>(c)];
  }
  std::sort(named.begin(), named.end());
  return named;
}

// of_query(b, list, position, own, end) are the scores of the blocks of the keys below `end`.
template <class Scores>
tensor<idx_t> lists_of_blocks(const tensor<double>& q, const tensor<double>& k, const block_list_options& o,
                              idx_t lists, idx_t n, const Scores& of_query) {
  tensor<idx_t> indices(q.batch(), lists, q.length(), n, -1);
  for (idx_t b = 0; b < q.batch(); ++b) {
    const idx_t queries = true_length(o.lengths, o.query_lengths, b, q.length());
    const idx_t keys = true_length(o.lengths, o.key_lengths, b, k.length());
    const auto& given = o.first_position;
    const idx_t first = given.empty() ? keys - queries : given[given.size() == 1 ? 0 : static_cast<std::size_t>(b)];
    for (idx_t list = 0; list < lists; ++list) {
      std::map<idx_t, std::vector<double>> known;  // by block of queries, where it is the same for all of one
      for (idx_t i = 0; i < queries; ++i) {
        const idx_t p = first + i, end = o.causal ? std::clamp<idx_t>(p + 1, 0, keys) : keys;
        const std::vector<double> scores = of_query(b, list, i, first, queries, keys, end, known);
        const auto named = best_blocks(scores, floor_of(p, o.block), o, n);
        std::copy(named.begin(), named.end(), &indices(b, list, i, 0));
      }
    }
  }
  return indices;
}

inline double dot_of(const tensor<double>& q, const tensor<double>& k, idx_t b, idx_t h, idx_t i, idx_t j) {
  double dot = 0;
  for (idx_t d = 0; d < q.dim(); ++d) dot += q(b, h, i, d) * k(b, h / (q.heads() / k.heads()), j, d);
  return dot;
}

inline tensor<idx_t> antidiagonal_blocks(const tensor<double>& q, const tensor<double>& k, const block_list_options& o,
                                         idx_t lists, idx_t n) {
  const double scale = o.scale.value_or(1 / std::sqrt(static_cast<double>(q.dim())));
  return lists_of_blocks(q, k, o, lists, n, [&](idx_t b, idx_t list, idx_t i, idx_t first, idx_t queries, idx_t keys,
                                                idx_t end, auto& known) {
    const idx_t block = floor_of(first + i, o.block), s = o.stride, group = q.heads() / lists;
    std::vector<double>& sums = known[block];
    if (!sums.empty() || end == 0) return sums;
    sums.resize(static_cast<std::size_t>((end + o.block - 1) / o.block));
    for (idx_t h = list * group; h < (list + 1) * group; ++h)
      for (idx_t row = block * o.block / s; row < (block + 1) * o.block / s; ++row) {
        std::vector<double> x;
        bool any = false;
        for (idx_t t = row * s; t < (row + 1) * s; ++t) any |= t >= first && t < first + queries;
        for (idx_t col = 0; any && col * s < keys && (!o.causal || col <= row); ++col) {
          double sum = 0;
          for (idx_t m = 0; m < s; ++m) {
            const idx_t at = row * s + s - 1 - m - first, j = col * s + m;
            if (at >= 0 && at < queries && j < keys) sum += dot_of(q, k, b, h, at, j);
          }
          x.push_back(sum * scale / static_cast<double>(s));
        }
        if (x.empty()) continue;
        const double most = *std::max_element(x.begin(), x.end());
        double all = 0;
        for (double& w : x) all += w = std::exp(w - most);
        for (std::size_t col = 0; col < x.size(); ++col)
          sums[col * static_cast<std::size_t>(s) / static_cast<std::size_t>(o.block)] += x[col] / all;
      }
    return sums;
  });
}

inline tensor<idx_t> min_max_blocks(const tensor<double>& q, const tensor<double>& k, const block_list_options& o,
                                    idx_t lists, idx_t n) {
  return lists_of_blocks(q, k, o, lists, n, [&](idx_t b, idx_t list, idx_t i, idx_t, idx_t, idx_t keys, idx_t end,
                                                auto&) {
    const idx_t group = q.heads() / lists;
    std::vector<double> scores;
    for (idx_t c = 0; c * o.block < end; ++c) {
      double score = 0;
      for (idx_t h = list * group; h < (list + 1) * group; ++h)
        for (idx_t d = 0; d < q.dim(); ++d) {
          double low = infinity, high = -infinity;
          for (idx_t j = c * o.block; j < std::min((c + 1) * o.block, keys); ++j) {
            const double x = k(b, h / (q.heads() / k.heads()), j, d);
            low = std::min(low, x), high = std::max(high, x);
          }
          score += std::max(q(b, h, i, d) * low, q(b, h, i, d) * high);
        }
      scores.push_back(score);
    }
    return scores;
  });
}

inline tensor<idx_t> vertical_slash_blocks(const tensor<double>& q, const tensor<double>& k,
                                           const block_list_options& o, idx_t lists, idx_t n) {
  const double scale = o.scale.value_or(1 / std::sqrt(static_cast<double>(q.dim())));
  return lists_of_blocks(q, k, o, lists, n, [&](idx_t b, idx_t list, idx_t i, idx_t first, idx_t queries, idx_t keys,
                                                idx_t end, auto& known) {
    const idx_t block = floor_of(first + i, o.block), group = q.heads() / lists;
    std::vector<double>& scores = known[block];
    if (!scores.empty() || end == 0) return scores;
    std::map<idx_t, double> vertical, slash;  // by column, by distance
    for (idx_t h = list * group; h < (list + 1) * group; ++h)
      for (idx_t t = std::max<idx_t>(0, queries - o.queries); t < queries; ++t) {
        std::vector<double> x;
        for (idx_t j = 0; j < std::min(keys, first + t + 1); ++j) x.push_back(dot_of(q, k, b, h, t, j) * scale);
        if (x.empty()) continue;
        const double most = *std::max_element(x.begin(), x.end());
        double all = 0;
        for (double& w : x) all += w = std::exp(w - most);
        for (idx_t j = 0; j < std::ssize(x); ++j) {
          const double w = x[static_cast<std::size_t>(j)] / all;
          vertical[j] += w, slash[first + t - j] += w;
        }
      }
    for (idx_t c = 0; c * o.block < end; ++c) {
      double score = 0;
      for (idx_t j = c * o.block; j < (c + 1) * o.block; ++j)
        if (vertical.contains(j)) score += vertical[j];
      // Of a diagonal the share of the block's queries that find it in these keys.
      const idx_t apart = (block - c) * o.block;
      for (idx_t at = apart - o.block + 1; at < apart + o.block; ++at)
        if (slash.contains(at))
          score += slash[at] * static_cast<double>(o.block - std::abs(at - apart)) / static_cast<double>(o.block);
      scores.push_back(score);
    }
    return scores;
  });
}

}  // namespace reference
