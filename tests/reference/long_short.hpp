#pragma once
// One softmax over the keys of a window and over compressed ones (Long-Short Transformer, Zhu 2021).
#include "reference/softmax.hpp"

namespace reference {

struct long_short_options : softmax_options {  // no ALiBi and no score: a compressed key has no position
  index left = 128, right = 128, block = 0, segment = 0;
  tensor<double> logits;  // [B, H, Lk, r]
  std::vector<double> local_gamma, local_beta, global_gamma, global_beta;
  double norm_eps = 1e-5;
};

inline std::vector<double> normed(std::vector<double> x, const std::vector<double>& gamma,
                                  const std::vector<double>& beta, double eps) {
  if (gamma.empty()) return x;
  double mean = 0, variance = 0;
  for (double value : x) mean += value / static_cast<double>(x.size());
  for (double value : x) variance += (value - mean) * (value - mean) / static_cast<double>(x.size());
  for (std::size_t d = 0; d < x.size(); ++d)
    x[d] = gamma[d] * (x[d] - mean) / std::sqrt(variance + eps) + (beta.empty() ? 0 : beta[d]);
  return x;
}

inline std::vector<double> row(const tensor<double>& x, index b, index h, index i) {
  std::vector<double> values;
  for (index d = 0; d < x.dim(); ++d) values.push_back(x(b, h, i, d));
  return values;
}

// A key with its value, and the position from which it is visible.
struct long_short_key {
  std::vector<double> key, value;
  index from;
};

// Compressed key c of tokens [begin, end).
inline long_short_key compressed(const tensor<double>& k, const tensor<double>& v, const long_short_options& o, index b,
                                 index h, index kv_head, index begin, index end, index c) {
  double largest = -infinity, sum = 0;
  for (index t = begin; t < end; ++t) largest = std::max(largest, o.logits(b, h, t, c));
  for (index t = begin; t < end; ++t) sum += std::exp(o.logits(b, h, t, c) - largest);
  long_short_key one{std::vector<double>(static_cast<std::size_t>(k.dim())),
                     std::vector<double>(static_cast<std::size_t>(v.dim())), end - 1};
  for (index t = begin; t < end; ++t) {
    const double weight = std::exp(o.logits(b, h, t, c) - largest) / sum;
    for (index d = 0; d < k.dim(); ++d) one.key[static_cast<std::size_t>(d)] += weight * k(b, kv_head, t, d);
    for (index d = 0; d < v.dim(); ++d) one.value[static_cast<std::size_t>(d)] += weight * v(b, kv_head, t, d);
  }
  one.key = normed(one.key, o.global_gamma, o.global_beta, o.norm_eps);
  one.value = normed(one.value, o.global_gamma, o.global_beta, o.norm_eps);
  return one;
}

inline result long_short(const tensor<double>& q, const tensor<double>& k, const tensor<double>& v,
                         const long_short_options& o) {
  result into = empty_result(q, v);
  const index group = q.heads() / k.heads();
  for (index b = 0; b < q.batch(); ++b)
    for (index h = 0; h < q.heads(); ++h) {
      const index queries = true_length(o.lengths, o.query_lengths, b, q.length());
      const index keys = true_length(o.lengths, o.key_lengths, b, k.length()), kv_head = h / group;
      std::vector<long_short_key> all;  // the compressed ones, then the tokens
      const index size = o.causal ? o.segment : std::max<index>(keys, 1);
      for (index end = size; end <= keys; end += size)
        for (index c = 0; c < o.logits.dim(); ++c)
          all.push_back(compressed(k, v, o, b, h, kv_head, end - size, end, c));
      const auto count = std::ssize(all);
      for (index j = 0; j < keys; ++j)
        all.push_back({normed(row(k, b, kv_head, j), o.local_gamma, o.local_beta, o.norm_eps),
                       normed(row(v, b, kv_head, j), o.local_gamma, o.local_beta, o.norm_eps), j});

      // softmax_row takes keys and values as tensors: those of this head alone
      tensor<double> row_q(1, 1, 1, q.dim()), own_k(1, 1, std::ssize(all), k.dim()),
          own_v(1, 1, std::ssize(all), v.dim());
      for (index n = 0; n < std::ssize(all); ++n) {
        for (index d = 0; d < k.dim(); ++d)
          own_k(0, 0, n, d) = all[static_cast<std::size_t>(n)].key[static_cast<std::size_t>(d)];
        for (index d = 0; d < v.dim(); ++d)
          own_v(0, 0, n, d) = all[static_cast<std::size_t>(n)].value[static_cast<std::size_t>(d)];
      }
      softmax_options head_options = o;
      if (!o.sinks.empty()) head_options.sinks = {o.sinks[static_cast<std::size_t>(h)]};
      for (index i = 0; i < queries; ++i) {
        const index position = i + keys - queries;
        index block = o.block ? position / o.block : 0;
        if (o.block && block * o.block > position) --block;
        const index first = o.block ? block * o.block : position, last = o.block ? first + o.block - 1 : position;
        for (index d = 0; d < q.dim(); ++d) row_q(0, 0, 0, d) = q(b, h, i, d);
        std::vector<double> scores;
        std::vector<index> seen;
        for (index n = 0; n < std::ssize(all); ++n) {
          const index token = n - count;
          if (o.causal && all[static_cast<std::size_t>(n)].from > position) continue;
          if (token >= 0 && (token < first - o.left || token > last + o.right)) continue;
          scores.push_back(plain_score(head_options, row_q, own_k, 0, 0, 0, n, 0));
          seen.push_back(n);
        }
        result one = empty_result(row_q, own_v);
        softmax_row(head_options, scores, seen, own_v, 0, 0, 0, one);
        for (index d = 0; d < v.dim(); ++d) into.out(b, h, i, d) = one.out(0, 0, 0, d);
        into.lse(b, h, i, 0) = one.lse(0, 0, 0, 0);
      }
    }
  return into;
}

}  // namespace reference
