#pragma once
// What the oracles of the exact operators share. They are written to be read, in double, with plain
// loops and no code of the library; padding and unseen keys are never read. N is double, or `variable` (variable.hpp)
// where gradients are wanted.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <limits>
#include <optional>

#include "reference/key_mask.hpp"

namespace reference {

inline constexpr double infinity = std::numeric_limits<double>::infinity();

// (score, batch, head, row of q, row of k) -> score
template <class N>
using basic_score_function = std::function<N(N, idx_t, idx_t, idx_t, idx_t)>;
using score_function = basic_score_function<double>;

template <class N>
struct basic_softmax_options {
  std::optional<double> scale;
  bool causal = false;
  std::vector<idx_t> lengths, query_lengths, key_lengths;
  std::optional<idx_t> first_position;  // of the first query among the keys
  std::vector<idx_t> first_positions;   // in its place one for each batch item
  idx_t span = 1;                       // tokens that a key stands for
  std::optional<double> softcap;
  std::vector<N> alibi_slopes, sinks;
  tensor<N> relative_bias;  // [1, 1, H|1, 2R + 1]: entry clamp(j - p, -R, R) + R
  tensor<N> relative_keys;     // [1, H|1, 2R + 1, D]
  tensor<N> relative_queries;  // [B, H, Lq, D]; q unless given
  tensor<N> position_queries;  // [1, H|1, 2R + 1, D]
  tensor<N> log_decay;         // [B, H, Lk, 1]
  tensor<double> key_mask;  // [B|1, 1, 1, Lk], 0: hidden
  double dropout_rate = 0;
  std::uint64_t dropout_seed = 0;
  basic_score_function<N> score;
};
using softmax_options = basic_softmax_options<double>;

// What the options of two number types share; each reference adds its own.
template <class N>
void copy_choices(const softmax_options& from, basic_softmax_options<N>& to) {
  to.scale = from.scale, to.softcap = from.softcap, to.causal = from.causal;
  to.lengths = from.lengths, to.query_lengths = from.query_lengths, to.key_lengths = from.key_lengths;
  to.first_position = from.first_position, to.first_positions = from.first_positions, to.span = from.span;
  to.key_mask = from.key_mask, to.dropout_rate = from.dropout_rate, to.dropout_seed = from.dropout_seed;
}

// The position of the first query of an item.
template <class N>
idx_t first_of(const basic_softmax_options<N>& o, idx_t b, idx_t queries, idx_t keys) {
  return o.first_positions.empty() ? o.first_position.value_or(keys - queries)
                                   : o.first_positions[static_cast<std::size_t>(b)];
}
// Whether the query at `position` comes before the last token of key j, and must not see it.
template <class N>
bool hides_later(const basic_softmax_options<N>& o, idx_t position, idx_t j) {
  return o.causal && (j + 1) * o.span - 1 > position;
}

// Whether dropout keeps the weight of the key at j for the query at position p, by the formula of the generator: the
// seed, the batch item, the head and p are mixed to 64 bits, of which j is mixed with both halves.
inline bool keeps_weight(double rate, std::uint64_t seed, idx_t b, idx_t h, idx_t p, idx_t j) {
  const auto split_mix = [](std::uint64_t x) {
    x += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
  };
  std::uint64_t row = split_mix(seed);
  row = split_mix(row ^ static_cast<std::uint64_t>(b));
  row = split_mix(row ^ static_cast<std::uint64_t>(h));
  row = split_mix(row ^ static_cast<std::uint64_t>(p));
  std::uint32_t x = static_cast<std::uint32_t>(j) ^ static_cast<std::uint32_t>(row & 0xffffffff);
  x = (x ^ (x >> 17)) * 0xed5ad4bb;
  x += static_cast<std::uint32_t>(row >> 32);
  x = (x ^ (x >> 11)) * 0xac4c1b51;
  x = (x ^ (x >> 15)) * 0x31848bab;
  x ^= x >> 14;
  return static_cast<double>(x) >= std::floor(rate * 4294967296.0);
}

template <class N>
struct basic_result {
  tensor<N> out;
  tensor<N> lse;  // [batch, head, length, 1]
  tensor<N> final_state{};  // of what has one
};
using result = basic_result<double>;

// Zeros and −infinity: what rows of padding and rows without a key keep.
template <class N>
basic_result<N> empty_result(const tensor<N>& q, const tensor<N>& v) {
  return {tensor<N>(q.batch(), q.heads(), q.length(), v.dim()),
          tensor<N>(q.batch(), q.heads(), q.length(), 1, -infinity)};
}

inline idx_t true_length(const std::vector<idx_t>& both, const std::vector<idx_t>& one, idx_t b, idx_t extent) {
  if (!both.empty()) return both[static_cast<std::size_t>(b)];
  return one.empty() ? extent : one[static_cast<std::size_t>(b)];
}

// The score of query row i and key row j, which stand `distance` positions apart, but for the bias
// and the caller's own function.
template <class N>
N plain_score(const basic_softmax_options<N>& options, const tensor<N>& q, const tensor<N>& k, idx_t b, idx_t h,
              idx_t i, idx_t j, idx_t distance) {
  using std::tanh;
  const idx_t kv_head = h / (q.heads() / k.heads());
  N dot = 0;
  for (idx_t d = 0; d < q.dim(); ++d) dot += q(b, h, i, d) * k(b, kv_head, j, d);
  if (const tensor<N>& table = options.relative_keys; !table.empty()) {
    const tensor<N>& queries = options.relative_queries.empty() ? q : options.relative_queries;
    const idx_t reach = table.length() / 2, entry = std::clamp(-distance, -reach, reach) + reach;
    for (idx_t d = 0; d < q.dim(); ++d) dot += queries(b, h, i, d) * table(0, table.heads() == 1 ? 0 : h, entry, d);
  }
  if (const tensor<N>& table = options.position_queries; !table.empty()) {
    const idx_t reach = table.length() / 2, entry = std::clamp(-distance, -reach, reach) + reach;
    for (idx_t d = 0; d < k.dim(); ++d) dot += k(b, kv_head, j, d) * table(0, table.heads() == 1 ? 0 : h, entry, d);
  }
  N score = dot * options.scale.value_or(1 / std::sqrt(static_cast<double>(q.dim())));
  if (options.softcap) score = *options.softcap * tanh(score / *options.softcap);
  if (!options.alibi_slopes.empty())
    score -= options.alibi_slopes[static_cast<std::size_t>(h)] * static_cast<double>(std::abs(distance));
  if (const tensor<N>& table = options.relative_bias; !table.empty()) {
    const idx_t reach = table.dim() / 2;
    score += table(0, 0, table.length() == 1 ? 0 : h, std::clamp(-distance, -reach, reach) + reach);
  }
  if (!options.log_decay.empty()) {  // of the tokens after the key, up to the query's
    const idx_t keys = true_length(options.lengths, options.key_lengths, b, k.length());
    for (idx_t t = j + 1; t <= std::min(j + distance, keys - 1); ++t) score += options.log_decay(b, h, t, 0);
  }
  if (key_hidden(options.key_mask, b, j)) return -infinity;
  return score;
}

// Row i of the result, of the query at position p, from the scores of the keys it sees. A score of −infinity hides its
// key.
template <class N>
void softmax_row(const basic_softmax_options<N>& options, const std::vector<N>& scores, const std::vector<idx_t>& keys,
                 const tensor<N>& v, idx_t b, idx_t h, idx_t i, basic_result<N>& into, idx_t p = 0) {
  using std::exp, std::log;
  double largest = -infinity;  // what only stabilises is a constant
  for (const N& x : scores)
    if (const double score = static_cast<double>(x); score > largest || std::isnan(score)) largest = score;
  if (largest == -infinity && !options.sinks.empty()) into.lse(b, h, i, 0) = options.sinks[static_cast<std::size_t>(h)];
  if (largest == -infinity) return;
  if (!options.sinks.empty())
    largest = std::max(largest, static_cast<double>(options.sinks[static_cast<std::size_t>(h)]));

  N denominator = 0;
  for (const N& score : scores) denominator += exp(score - largest);
  if (!options.sinks.empty()) denominator += exp(options.sinks[static_cast<std::size_t>(h)] - largest);

  const idx_t kv_head = h / (into.out.heads() / v.heads());
  for (std::size_t n = 0; n < keys.size(); ++n) {
    if (scores[n] == -infinity) continue;
    N weight = exp(scores[n] - largest) / denominator;
    if (options.dropout_rate > 0) {
      if (!keeps_weight(options.dropout_rate, options.dropout_seed, b, h, p, keys[n])) continue;
      weight = weight * (1 / (1 - options.dropout_rate));
    }
    for (idx_t d = 0; d < v.dim(); ++d) into.out(b, h, i, d) += weight * v(b, kv_head, keys[n], d);
  }
  into.lse(b, h, i, 0) = largest + log(denominator);
}

}  // namespace reference
