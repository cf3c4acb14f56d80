#pragma once
// One softmax over the keys of a window and over compressed ones (Long-Short Transformer, Zhu 2021).
#include "reference/softmax.hpp"

namespace reference {

template <class N>
struct basic_long_short_options : basic_softmax_options<N> {  // no ALiBi and no score: a compressed key has no position
  idx_t left = 128, right = 128, block = 0, segment = 0;
  tensor<N> logits;  // [B, H, Lk, r]
  std::vector<N> local_gamma, local_beta, global_gamma, global_beta;
  double norm_eps = 1e-5;
};
using long_short_options = basic_long_short_options<double>;

template <class N>
std::vector<N> normed(std::vector<N> x, const std::vector<N>& gamma, const std::vector<N>& beta, double eps) {
  using std::sqrt;
  if (gamma.empty()) return x;
  N mean = 0, variance = 0;
  for (const N& value : x) mean += value / static_cast<double>(x.size());
  for (const N& value : x) variance += (value - mean) * (value - mean) / static_cast<double>(x.size());
  for (std::size_t d = 0; d < x.size(); ++d)
    x[d] = gamma[d] * (x[d] - mean) / sqrt(variance + eps) + (beta.empty() ? N(0) : beta[d]);
  return x;
}

template <class N>
std::vector<N> row(const tensor<N>& x, idx_t b, idx_t h, idx_t i) {
  std::vector<N> values;
  for (idx_t d = 0; d < x.dim(); ++d) values.push_back(x(b, h, i, d));
  return values;
}

// A key with its value, and the position from which it is visible.
template <class N>
struct long_short_key {
  std::vector<N> key, value;
  idx_t from;
};

// Compressed key c of those of tokens [begin, end) that are seen.
template <class N>
long_short_key<N> compressed(const tensor<N>& k, const tensor<N>& v, const basic_long_short_options<N>& o, idx_t b,
                             idx_t h, idx_t kv_head, idx_t begin, idx_t end, idx_t c) {
  using std::exp;
  double largest = -infinity;  // only stabilises
  N sum = 0;
  std::vector<idx_t> seen;
  for (idx_t t = begin; t < end; ++t)
    if (!key_hidden(o.key_mask, b, t)) seen.push_back(t);
  for (idx_t t : seen) largest = std::max(largest, static_cast<double>(o.logits(b, h, t, c)));
  for (idx_t t : seen) sum += exp(o.logits(b, h, t, c) - largest);
  long_short_key<N> one{std::vector<N>(static_cast<std::size_t>(k.dim())),
                        std::vector<N>(static_cast<std::size_t>(v.dim())), end - 1};
  for (idx_t t : seen) {
    const N weight = exp(o.logits(b, h, t, c) - largest) / sum;
    for (idx_t d = 0; d < k.dim(); ++d) one.key[static_cast<std::size_t>(d)] += weight * k(b, kv_head, t, d);
    for (idx_t d = 0; d < v.dim(); ++d) one.value[static_cast<std::size_t>(d)] += weight * v(b, kv_head, t, d);
  }
  one.key = normed(one.key, o.global_gamma, o.global_beta, o.norm_eps);
  one.value = normed(one.value, o.global_gamma, o.global_beta, o.norm_eps);
  return one;
}

template <class N>
basic_result<N> long_short(const tensor<N>& q, const tensor<N>& k, const tensor<N>& v,
                           const basic_long_short_options<N>& o) {
  basic_result<N> into = empty_result(q, v);
  const idx_t group = k.heads() ? q.heads() / k.heads() : 1;
  for (idx_t b = 0; b < q.batch(); ++b)
    for (idx_t h = 0; h < q.heads(); ++h) {
      const idx_t queries = true_length(o.lengths, o.query_lengths, b, q.length());
      const idx_t keys = true_length(o.lengths, o.key_lengths, b, k.length()), kv_head = h / group;
      std::vector<long_short_key<N>> all;  // the compressed ones, then the tokens
      const idx_t size = o.causal ? o.segment : std::max<idx_t>(keys, 1);
      const auto any_seen = [&](idx_t begin, idx_t end) {
        while (begin < end && key_hidden(o.key_mask, b, begin)) ++begin;
        return begin < end;
      };
      for (idx_t end = size; end <= keys; end += size)
        for (idx_t c = 0; c < o.logits.dim(); ++c)
          if (any_seen(end - size, end)) all.push_back(compressed(k, v, o, b, h, kv_head, end - size, end, c));
      const auto count = std::ssize(all);
      for (idx_t j = 0; j < keys; ++j)
        if (any_seen(j, j + 1)) all.push_back({normed(row(k, b, kv_head, j), o.local_gamma, o.local_beta, o.norm_eps),
                       normed(row(v, b, kv_head, j), o.local_gamma, o.local_beta, o.norm_eps), j});

      // softmax_row takes keys and values as tensors: those of this head alone
      tensor<N> row_q(1, 1, 1, q.dim()), own_k(1, 1, std::ssize(all), k.dim()), own_v(1, 1, std::ssize(all), v.dim());
      for (idx_t n = 0; n < std::ssize(all); ++n) {
        for (idx_t d = 0; d < k.dim(); ++d)
          own_k(0, 0, n, d) = all[static_cast<std::size_t>(n)].key[static_cast<std::size_t>(d)];
        for (idx_t d = 0; d < v.dim(); ++d)
          own_v(0, 0, n, d) = all[static_cast<std::size_t>(n)].value[static_cast<std::size_t>(d)];
      }
      basic_softmax_options<N> head_options = o;
      head_options.key_mask = {};
      if (!o.sinks.empty()) head_options.sinks = {o.sinks[static_cast<std::size_t>(h)]};
      for (idx_t i = 0; i < queries; ++i) {
        const idx_t position = i + keys - queries;
        idx_t block = o.block ? position / o.block : 0;
        if (o.block && block * o.block > position) --block;
        const idx_t first = o.block ? block * o.block : position, last = o.block ? first + o.block - 1 : position;
        for (idx_t d = 0; d < q.dim(); ++d) row_q(0, 0, 0, d) = q(b, h, i, d);
        std::vector<N> scores;
        std::vector<idx_t> seen;
        for (idx_t n = 0; n < std::ssize(all); ++n) {
          const idx_t token = all[static_cast<std::size_t>(n)].from;
          if (o.causal && token > position) continue;
          if (n >= count && (token < first - o.left || token > last + o.right)) continue;
          scores.push_back(plain_score(head_options, row_q, own_k, 0, 0, 0, n, 0));
          seen.push_back(n);
        }
        basic_result<N> one = empty_result(row_q, own_v);
        softmax_row(head_options, scores, seen, own_v, 0, 0, 0, one);
        for (idx_t d = 0; d < v.dim(); ++d) into.out(b, h, i, d) = one.out(0, 0, 0, d);
        into.lse(b, h, i, 0) = one.lse(0, 0, 0, 0);
      }
    }
  return into;
}

}  // namespace reference
