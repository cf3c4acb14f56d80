#pragma once
// Multipole attention (after Hooper 2025 and Vyas 2020), written as its definition: for every query the keys its block
// takes, the rest of every cluster as one key, in the causal form its own segment; one softmax. With r the scores of
// the block's mean query, the score of a cluster gets log sum e^r - mean r over its rest, where keys were ranked; else
// log of how many. Choices and assignments are constants.
#include <numeric>

#include "reference/softmax.hpp"

namespace reference {

template <class N>
struct basic_multipole_options : basic_softmax_options<N> {  // no ALiBi and no score: a cluster has no position
  idx_t exact = 192, clusters = 64, block = 96, probe = 32, lookback = 16, candidate_clusters = 0, segment = 256;
  idx_t iterations = 1;
  tensor<double> assignment;  // [B, Hkv, Lk, 1], or empty: k-means
  // Different keys of a segment, that many, from which k-means starts.
  std::function<std::vector<idx_t>(idx_t segment, idx_t keys, idx_t clusters)> starts;
};
using multipole_options = basic_multipole_options<double>;

template <class N>
void copy_choices(const multipole_options& from, basic_multipole_options<N>& to) {
  copy_choices(static_cast<const softmax_options&>(from), static_cast<basic_softmax_options<N>&>(to));
  to.exact = from.exact, to.clusters = from.clusters, to.block = from.block, to.probe = from.probe;
  to.lookback = from.lookback, to.candidate_clusters = from.candidate_clusters, to.segment = from.segment;
  to.iterations = from.iterations, to.assignment = from.assignment, to.starts = from.starts;
}

// Rows of x as numbers.
template <class N>
std::vector<double> numbers(const tensor<N>& x, idx_t b, idx_t h, idx_t i) {
  std::vector<double> row;
  for (idx_t d = 0; d < x.dim(); ++d) row.push_back(static_cast<double>(x(b, h, i, d)));
  return row;
}
inline double inner(const std::vector<double>& x, const std::vector<double>& y) {
  double sum = 0;
  for (std::size_t d = 0; d < x.size(); ++d) sum += x[d] * y[d];
  return sum;
}
inline std::vector<double> mean_of(const std::vector<std::vector<double>>& rows, std::size_t dim) {
  std::vector<double> mean(dim);
  for (const auto& row : rows)
    for (std::size_t d = 0; d < dim; ++d) mean[d] += row[d] / static_cast<double>(rows.size());
  return mean;
}

// The cluster of every key of a segment, by Lloyd's iteration.
inline std::vector<idx_t> k_means(const std::vector<std::vector<double>>& keys, std::vector<idx_t> starts,
                                  idx_t iterations) {
  std::vector<std::vector<double>> centres;
  for (idx_t j : starts) centres.push_back(keys[static_cast<std::size_t>(j)]);
  std::vector<idx_t> cluster(keys.size());
  for (idx_t step = 0;; ++step) {
    for (std::size_t j = 0; j < keys.size(); ++j) {
      double nearest = infinity;
      for (std::size_t c = 0; c < centres.size(); ++c) {
        double distance = 0;
        for (std::size_t d = 0; d < keys[j].size(); ++d)
          distance += (keys[j][d] - centres[c][d]) * (keys[j][d] - centres[c][d]);
        if (distance < nearest) nearest = distance, cluster[j] = static_cast<idx_t>(c);
      }
    }
    if (step == iterations) return cluster;
    for (std::size_t c = 0; c < centres.size(); ++c) {
      std::vector<std::vector<double>> members;
      for (std::size_t j = 0; j < keys.size(); ++j)
        if (cluster[j] == static_cast<idx_t>(c)) members.push_back(keys[j]);
      if (!members.empty()) centres[c] = mean_of(members, centres[c].size());
    }
  }
}

// The cluster of every key, numbered through all segments.
template <class N>
std::vector<idx_t> clusters_of(const tensor<N>& k, const basic_multipole_options<N>& o, idx_t b, idx_t h, idx_t keys) {
  std::vector<idx_t> cluster(static_cast<std::size_t>(keys), idx_t(0));
  const idx_t size = o.causal ? o.segment : keys;
  for (idx_t begin = 0; size > 0 && begin + size <= keys; begin += size) {
    std::vector<std::vector<double>> rows;
    for (idx_t j = begin; j < begin + size; ++j) rows.push_back(numbers(k, b, h, j));
    std::vector<idx_t> own(static_cast<std::size_t>(size));
    if (!o.assignment.empty())
      for (idx_t j = 0; j < size; ++j)
        own[static_cast<std::size_t>(j)] = static_cast<idx_t>(o.assignment(b, h, begin + j, 0));
    else if (size <= o.clusters)
      std::iota(own.begin(), own.end(), idx_t(0));
    else if (o.clusters > 0)
      own = k_means(rows, o.starts(begin / size, size, o.clusters), o.iterations);
    for (idx_t j = 0; j < size; ++j)
      cluster[static_cast<std::size_t>(begin + j)] = begin / size * o.clusters + own[static_cast<std::size_t>(j)];
  }
  return cluster;
}

// The places of the `count` largest among those allowed, of equals the earlier; NaN counts as -infinity.
inline std::vector<idx_t> largest(std::vector<double> ranks, const std::vector<idx_t>& allowed, idx_t count) {
  for (double& x : ranks)
    if (std::isnan(x)) x = -infinity;
  std::vector<idx_t> order = allowed;
  std::stable_sort(order.begin(), order.end(), [&](idx_t x, idx_t y) {
    return ranks[static_cast<std::size_t>(x)] > ranks[static_cast<std::size_t>(y)];
  });
  order.resize(static_cast<std::size_t>(std::min(count, std::ssize(order))));
  return order;
}

// The keys below `past` a block takes: true for each. `ranked` becomes true for the keys it chose from, if it chose.
template <class N>
std::vector<bool> taken_keys(const tensor<N>& q, const tensor<N>& k, const basic_multipole_options<N>& o, idx_t b,
                             idx_t h, idx_t first_probe, idx_t end_probe, idx_t past,
                             const std::vector<idx_t>& cluster, std::vector<bool>& ranked) {
  const idx_t kv_head = h / (q.heads() / k.heads());
  std::vector<bool> taken(static_cast<std::size_t>(past), o.exact >= past);
  ranked.assign(static_cast<std::size_t>(past), false);
  if (o.exact >= past || o.exact == 0) return taken;
  const double scale = o.scale.value_or(1), sign = scale < 0 ? -1 : scale > 0 ? 1 : 0;
  const auto dim = static_cast<std::size_t>(k.dim());
  std::vector<std::vector<double>> keys, probes;
  for (idx_t j = 0; j < past; ++j) keys.push_back(numbers(k, b, kv_head, j));
  for (idx_t end = end_probe; end > first_probe; end -= o.probe) {
    std::vector<std::vector<double>> rows;
    for (idx_t i = std::max(end - o.probe, first_probe); i < end; ++i) rows.push_back(numbers(q, b, h, i));
    probes.push_back(mean_of(rows, dim));
  }
  const std::vector<double> middle = mean_of(keys, dim);
  const auto rank = [&](const std::vector<double>& x) {
    double highest = -infinity;
    for (const auto& probe : probes) highest = std::max(highest, sign * (inner(probe, x) - inner(probe, middle)));
    return highest;
  };
  std::vector<idx_t> allowed;
  if (o.candidate_clusters > 0 && o.clusters > 0) {
    std::vector<double> ranks;
    std::vector<idx_t> with_keys;
    const idx_t all = *std::max_element(cluster.begin(), cluster.begin() + past) + 1;
    for (idx_t c = 0; c < all; ++c) {
      std::vector<std::vector<double>> members;
      for (idx_t j = 0; j < past; ++j)
        if (cluster[static_cast<std::size_t>(j)] == c) members.push_back(keys[static_cast<std::size_t>(j)]);
      ranks.push_back(members.empty() ? 0 : rank(mean_of(members, dim)));
      if (!members.empty()) with_keys.push_back(c);
    }
    const std::vector<idx_t> near = largest(ranks, with_keys, o.candidate_clusters);
    for (idx_t j = 0; j < past; ++j)
      if (std::find(near.begin(), near.end(), cluster[static_cast<std::size_t>(j)]) != near.end()) allowed.push_back(j);
  } else {
    allowed.resize(static_cast<std::size_t>(past));
    std::iota(allowed.begin(), allowed.end(), idx_t(0));
  }
  std::vector<double> ranks;
  for (const auto& key : keys) ranks.push_back(rank(key));
  for (idx_t j : allowed) ranked[static_cast<std::size_t>(j)] = true;
  for (idx_t j : largest(ranks, allowed, o.exact)) taken[static_cast<std::size_t>(j)] = true;
  return taken;
}

// The scores that the mean of queries [first, end) has with the keys below `past`.
template <class N>
std::vector<N> mean_scores(const tensor<N>& q, const tensor<N>& k, const basic_multipole_options<N>& o, idx_t b,
                           idx_t h, idx_t first, idx_t end, idx_t past) {
  tensor<N> mean(1, 1, 1, q.dim()), keys(1, 1, past, k.dim());
  for (idx_t d = 0; d < q.dim(); ++d) {
    for (idx_t i = first; i < end; ++i) mean(0, 0, 0, d) += q(b, h, i, d) / N(static_cast<double>(end - first));
    for (idx_t j = 0; j < past; ++j) keys(0, 0, j, d) = k(b, h / (q.heads() / k.heads()), j, d);
  }
  std::vector<N> scores;
  for (idx_t j = 0; j < past; ++j) scores.push_back(plain_score<N>(o, mean, keys, 0, 0, 0, j, 0));
  return scores;
}

// log sum e^x - mean x: of one number 0, of n equal ones log n.
template <class N>
N log_sum_about_mean(const std::vector<N>& x) {
  using std::exp, std::log;
  double largest = -infinity;  // what only stabilises is a constant
  for (const N& one : x) largest = std::max(largest, static_cast<double>(one));
  N sum = 0, mean = 0;
  for (const N& one : x) {
    sum += exp(one - largest);
    mean += (one - largest) / N(static_cast<double>(x.size()));
  }
  return log(sum) - mean;
}

template <class N>
basic_result<N> multipole(const tensor<N>& q, const tensor<N>& k, const tensor<N>& v,
                          const basic_multipole_options<N>& o) {
  using std::log;
  basic_result<N> into = empty_result(q, v);
  for (idx_t b = 0; b < q.batch(); ++b)
    for (idx_t h = 0; h < q.heads(); ++h) {
      const idx_t queries = true_length(o.lengths, o.query_lengths, b, q.length());
      const idx_t keys = true_length(o.lengths, o.key_lengths, b, k.length()), shift = keys - queries;
      const idx_t kv_head = h / (q.heads() / k.heads());
      const std::vector<idx_t> cluster = clusters_of(k, o, b, kv_head, keys);
      std::vector<bool> taken, ranked;
      std::vector<N> of_mean;
      idx_t block_end = 0;
      for (idx_t i = 0; i < queries; ++i) {
        const idx_t position = i + shift;
        if (o.causal && position < 0) {
          if (!o.sinks.empty()) into.lse(b, h, i, 0) = o.sinks[static_cast<std::size_t>(h)];
          continue;
        }
        const idx_t past = o.causal ? position / o.segment * o.segment : keys;
        if (i >= block_end) {  // a block begins
          idx_t first = i, end;
          if (o.causal) {  // blocks are counted from the segment's start
            const idx_t in_segment = position - past;
            end = std::min((in_segment / o.block + 1) * o.block, o.segment) + past - shift;
            first = std::max<idx_t>(0, i + 1 - o.lookback);
          } else {
            end = i + o.block;
          }
          block_end = std::min(end, queries);
          const idx_t end_probe = o.causal ? i + 1 : block_end;
          taken = taken_keys(q, k, o, b, h, first, end_probe, past, cluster, ranked);
          of_mean = mean_scores(q, k, o, b, h, first, end_probe, past);
        }
        // what the query sees: slots of keys and values, with log(how many keys)
        std::vector<std::vector<N>> slot_keys, slot_values;
        std::vector<N> slot_logs;
        const auto row = [&](const tensor<N>& x, idx_t j) {
          std::vector<N> values;
          for (idx_t d = 0; d < x.dim(); ++d) values.push_back(x(b, kv_head, j, d));
          return values;
        };
        const idx_t clusters = o.clusters == 0 || past == 0 ? 0 : past / (o.causal ? o.segment : past) * o.clusters;
        for (idx_t c = 0; c < clusters; ++c) {
          std::vector<N> key(static_cast<std::size_t>(k.dim())), value(static_cast<std::size_t>(v.dim()));
          double count = 0;
          std::vector<N> scores;  // of the rest, where keys were ranked
          for (idx_t j = 0; j < past; ++j) {
            if (cluster[static_cast<std::size_t>(j)] != c || taken[static_cast<std::size_t>(j)]) continue;
            count += 1;
            if (ranked[static_cast<std::size_t>(j)]) scores.push_back(of_mean[static_cast<std::size_t>(j)]);
            for (idx_t d = 0; d < k.dim(); ++d) key[static_cast<std::size_t>(d)] += k(b, kv_head, j, d);
            for (idx_t d = 0; d < v.dim(); ++d) value[static_cast<std::size_t>(d)] += v(b, kv_head, j, d);
          }
          if (count == 0) continue;
          for (N& x : key) x /= N(count);
          for (N& x : value) x /= N(count);
          slot_keys.push_back(key), slot_values.push_back(value);
          slot_logs.push_back(scores.empty() ? N(log(count)) : log_sum_about_mean(scores));
        }
        for (idx_t j = 0; j < (o.causal ? position + 1 : keys); ++j) {
          if (j < past && !taken[static_cast<std::size_t>(j)]) continue;
          slot_keys.push_back(row(k, j)), slot_values.push_back(row(v, j)), slot_logs.push_back(0);
        }
        const idx_t count = std::ssize(slot_keys);
        tensor<N> one_q(1, 1, 1, q.dim()), own_k(1, 1, count, k.dim()), own_v(1, 1, count, v.dim());
        for (idx_t d = 0; d < q.dim(); ++d) one_q(0, 0, 0, d) = q(b, h, i, d);
        for (idx_t n = 0; n < count; ++n) {
          const auto at = static_cast<std::size_t>(n);
          for (idx_t d = 0; d < k.dim(); ++d) own_k(0, 0, n, d) = slot_keys[at][static_cast<std::size_t>(d)];
          for (idx_t d = 0; d < v.dim(); ++d) own_v(0, 0, n, d) = slot_values[at][static_cast<std::size_t>(d)];
        }
        basic_softmax_options<N> head_options = o;
        if (!o.sinks.empty()) head_options.sinks = {o.sinks[static_cast<std::size_t>(h)]};
        std::vector<N> scores;
        std::vector<idx_t> seen;
        for (idx_t n = 0; n < count; ++n) {
          scores.push_back(plain_score(head_options, one_q, own_k, 0, 0, 0, n, 0) +
                           slot_logs[static_cast<std::size_t>(n)]);
          seen.push_back(n);
        }
        basic_result<N> one = empty_result(one_q, own_v);
        softmax_row(head_options, scores, seen, own_v, 0, 0, 0, one);
        for (idx_t d = 0; d < v.dim(); ++d) into.out(b, h, i, d) = one.out(0, 0, 0, d);
        into.lse(b, h, i, 0) = one.lse(0, 0, 0, 0);
      }
    }
  return into;
}

}  // namespace reference
