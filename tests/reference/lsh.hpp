#pragma once
// Attention by locality-sensitive hashing (Reformer, Kitaev 2020), written as its definition: for every round and
// token, the chunks it sees; the keys of all rounds in one softmax.
#include <algorithm>
#include <numeric>

#include "reference/softmax.hpp"

namespace reference {

template <class N>
struct basic_lsh_options : basic_softmax_options<N> {
  idx_t rounds = 4, buckets = 64, chunk = 64, lookback = 1, lookahead = 0;
  bool wrap = false, scaled = true;
  double norm_eps = 0;
  tensor<double> rotations;  // [H|1, rounds, D, buckets / 2]
};
using lsh_options = basic_lsh_options<double>;

template <class N>
void copy_choices(const lsh_options& from, basic_lsh_options<N>& to) {
  copy_choices(static_cast<const softmax_options&>(from), static_cast<basic_softmax_options<N>&>(to));
  to.rounds = from.rounds, to.buckets = from.buckets, to.chunk = from.chunk;
  to.lookback = from.lookback, to.lookahead = from.lookahead, to.wrap = from.wrap, to.scaled = from.scaled;
  to.norm_eps = from.norm_eps, to.rotations = from.rotations;
}

// x R for one token and round, then its negative: constants, for a choice has no gradient.
template <class N>
std::vector<double> lsh_products(const tensor<N>& q, const basic_lsh_options<N>& o, idx_t b, idx_t h, idx_t i,
                                 idx_t round) {
  const idx_t half = o.buckets / 2;
  std::vector<double> products(static_cast<std::size_t>(o.buckets));
  for (idx_t c = 0; c < half; ++c) {
    double sum = 0;
    for (idx_t d = 0; d < q.dim(); ++d)
      sum += static_cast<double>(q(b, h, i, d)) * o.rotations(o.rotations.batch() == 1 ? 0 : h, round, d, c);
    products[static_cast<std::size_t>(c)] = sum;
    products[static_cast<std::size_t>(half + c)] = -sum;
  }
  return products;
}

// How near the second-best bucket of any token comes to its best: rounding must not decide.
inline double lsh_gap(const tensor<double>& q, const lsh_options& o) {
  double gap = infinity;
  for (idx_t b = 0; b < q.batch(); ++b)
    for (idx_t h = 0; h < q.heads(); ++h)
      for (idx_t i = 0; i < q.length(); ++i)
        for (idx_t round = 0; round < o.rounds; ++round) {
          std::vector<double> products = lsh_products(q, o, b, h, i, round);
          std::nth_element(products.begin(), products.begin() + 1, products.end(), std::greater<>());
          gap = std::min(gap, products[0] - products[1]);
        }
  return gap;
}

// k = q / sqrt(|q|^2 + D eps)
template <class N>
tensor<N> lsh_keys(const tensor<N>& q, double eps) {
  using std::sqrt;
  tensor<N> k = q;
  for (idx_t b = 0; b < q.batch(); ++b)
    for (idx_t h = 0; h < q.heads(); ++h)
      for (idx_t i = 0; i < q.length(); ++i) {
        N squares = 0;
        for (idx_t d = 0; d < q.dim(); ++d) squares += q(b, h, i, d) * q(b, h, i, d);
        const N norm = sqrt(squares + static_cast<double>(q.dim()) * eps);
        for (idx_t d = 0; d < q.dim(); ++d) k(b, h, i, d) = norm > 0 ? q(b, h, i, d) / norm : N(0);
      }
  return k;
}

template <class N>
basic_result<N> lsh(const tensor<N>& q, const tensor<N>& v, basic_lsh_options<N> o) {
  basic_result<N> into = empty_result(q, v);
  const tensor<N> k = lsh_keys(q, o.norm_eps);
  if (!o.scaled) o.scale = 1;
  for (idx_t b = 0; b < q.batch(); ++b)
    for (idx_t h = 0; h < q.heads(); ++h) {
      const idx_t n = true_length(o.lengths, {}, b, q.length());
      const idx_t chunks = (n + o.chunk - 1) / o.chunk, ring = chunks * o.rounds;
      const idx_t back = o.wrap ? std::min(o.lookback, ring - 1) : o.lookback;  // no chunk twice
      const idx_t ahead = o.wrap ? std::min(o.lookahead, ring - 1 - back) : o.lookahead;
      std::vector<std::vector<idx_t>> order(static_cast<std::size_t>(o.rounds));
      for (idx_t round = 0; round < o.rounds; ++round) {
        std::vector<idx_t> bucket;
        for (idx_t i = 0; i < n; ++i) {
          const std::vector<double> products = lsh_products(q, o, b, h, i, round);
          bucket.push_back(std::max_element(products.begin(), products.end()) - products.begin());
        }
        auto& sorted = order[static_cast<std::size_t>(round)];
        sorted.resize(static_cast<std::size_t>(n));
        std::iota(sorted.begin(), sorted.end(), idx_t(0));
        std::stable_sort(sorted.begin(), sorted.end(), [&](idx_t x, idx_t y) {
          return bucket[static_cast<std::size_t>(x)] < bucket[static_cast<std::size_t>(y)];
        });
      }
      std::vector<std::vector<idx_t>> keys(static_cast<std::size_t>(n));  // a key as often as it is offered
      for (idx_t round = 0; round < o.rounds; ++round)
        for (idx_t t = 0; t < n; ++t) {
          const idx_t i = order[static_cast<std::size_t>(round)][static_cast<std::size_t>(t)], own = t / o.chunk;
          for (idx_t c = own - back; c <= own + ahead; ++c) {
            if (!o.wrap && (c < 0 || c >= chunks)) continue;
            const idx_t place = ((round * chunks + c) % ring + ring) % ring;
            const auto& from = order[static_cast<std::size_t>(place / chunks)];
            for (idx_t u = place % chunks * o.chunk; u < std::min(n, (place % chunks + 1) * o.chunk); ++u) {
              const idx_t j = from[static_cast<std::size_t>(u)];
              if (j != i && !(o.causal && j > i)) keys[static_cast<std::size_t>(i)].push_back(j);
            }
          }
        }
      for (idx_t i = 0; i < n; ++i) {
        auto& seen = keys[static_cast<std::size_t>(i)];
        const auto scores_of = [&] {
          std::vector<N> scores;
          for (idx_t j : seen) {
            scores.push_back(plain_score(o, q, k, b, h, i, j, i - j));
            if (o.score) scores.back() = o.score(scores.back(), b, h, i, j);
          }
          return scores;
        };
        std::vector<N> scores = scores_of();
        if (std::all_of(scores.begin(), scores.end(), [](const N& s) { return s == -infinity; })) {
          seen = {i};  // no other key
          scores = scores_of();
        }
        softmax_row(o, scores, seen, v, b, h, i, into);
      }
    }
  return into;
}

}  // namespace reference
