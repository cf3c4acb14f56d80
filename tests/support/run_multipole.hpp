#pragma once
// Runs a problem through multipole.
#include <attn/core/random.hpp>

#include "reference/multipole.hpp"
#include "support/call_multipole.hpp"
#include "support/run_pattern.hpp"

namespace testing {

using multipole_problem = problem<reference::multipole_options>;

// Different keys of a segment, drawn as the library says it does: a shuffle by the numbers of (seed, segment).
inline std::function<std::vector<idx_t>(idx_t, idx_t, idx_t)> drawn_starts(std::uint64_t seed) {
  return [seed](idx_t segment, idx_t keys, idx_t clusters) {
    attn::random_numbers random(seed, static_cast<std::uint64_t>(segment));
    std::vector<idx_t> order(static_cast<std::size_t>(keys));
    std::iota(order.begin(), order.end(), idx_t(0));
    for (idx_t c = 0; c < clusters; ++c)
      std::swap(order[static_cast<std::size_t>(c)], order[static_cast<std::size_t>(c + random.below(keys - c))]);
    order.resize(static_cast<std::size_t>(clusters));
    return order;
  };
}

// Numbers of few digits: sums and products of some of them are exact in float, and so are choices.
inline void round_to_eighths(tensor<double>& x) {
  for (double& value : x.data) value = std::nearbyint(value * 8) / 8;
}

inline multipole_problem multipole_of(const problem_shape& s, std::uint64_t seed = 1) {
  multipole_problem p = random_problem<multipole_problem>(s, seed);
  p.options.starts = drawn_starts(0);
  return p;
}

// What float computes exactly: probes of 1, 2, 4 or 8 queries, keys whose number is a power of two where they are
// several, clusters that are given. Choices are then those of double.
inline multipole_problem exact_choices(const problem_shape& s, idx_t clusters, std::uint64_t seed = 1) {
  multipole_problem p = multipole_of(s, seed);
  round_to_eighths(p.q), round_to_eighths(p.k);
  p.options.assignment = tensor<double>(s.batch, s.kv_heads, s.keys, 1);
  random_source random(seed + 5);
  for (double& c : p.options.assignment.data) c = static_cast<double>(random.below(clusters));
  p.options.clusters = clusters;
  return p;
}

// Bits beyond the common ones: 64 k-means in place of an assignment, 128 candidates, 256 no exact keys or few of them,
// 512 probes of several queries.
inline void choose_multipole(reference::multipole_options& o, int choice) {
  o.alibi_slopes = {}, o.score = {};
  o.exact = choice & 256 ? choice % 3 : 9;
  o.block = choice & 512 ? 8 : 5, o.probe = choice & 512 ? 4 : 1, o.lookback = choice & 512 ? 8 : 2;
  o.segment = 16;
  if (choice & 128) o.candidate_clusters = 3;
  if (choice & 64) o.assignment = {};
}

template <class S>
multipole_problem rounded(multipole_problem p) {
  p.q = rounded<S>(p.q), p.k = rounded<S>(p.k), p.v = rounded<S>(p.v);
  round_options<S>(p.options);
  return p;
}

template <class S>
struct stored_multipole_options {
  common_softmax_options<S, attn::multipole_options<S>> common;
  std::vector<idx_t> assignment;
  attn::multipole_options<S>& options = common.options;

  explicit stored_multipole_options(const reference::multipole_options& from, std::uint64_t seed = 0) : common(from) {
    auto& o = options;
    o.exact = from.exact, o.clusters = from.clusters, o.block = from.block, o.probe = from.probe;
    if (from.causal) o.lookback = from.lookback, o.segment = from.segment;
    o.candidate_clusters = from.candidate_clusters;
    o.iterations = from.iterations, o.seed = seed;
    for (double c : from.assignment.data) assignment.push_back(static_cast<idx_t>(c));
    if (!from.assignment.empty())
      o.assignment = {assignment.data(), {from.assignment.batch(), from.assignment.heads(), from.assignment.length()}};
  }
};

template <class S>
reference::result run_multipole(const multipole_problem& p, attn::execution& execution) {
  stored_multipole_options<S> stored(p.options);
  const tensor<S> q = cast<S>(p.q), k = cast<S>(p.k), v = cast<S>(p.v);
  tensor<S> out(q.batch(), q.heads(), q.length(), v.dim(), S(7));
  tensor<real<S>> lse(q.batch(), q.heads(), q.length(), 1, real<S>(7));
  stored.options.lse = row_view(lse);
  compiled_multipole<S>::call(view(q), view(k), view(v), view(out), stored.options, execution);
  return {cast<double>(out), cast<double>(lse)};
}
template <class S>
reference::result run_multipole(const multipole_problem& p) {
  attn::execution serial;
  return run_multipole<S>(p, serial);
}

// Against the reference on the same rounded inputs.
template <class S>
errors multipole_errors(const multipole_problem& given) {
  const multipole_problem p = rounded<S>(given);
  const reference::result actual = run_multipole<S>(p), wanted = reference::multipole(p.q, p.k, p.v, p.options);
  return {relative_error(actual.out, wanted.out), relative_error(actual.lse, wanted.lse)};
}

}  // namespace testing
