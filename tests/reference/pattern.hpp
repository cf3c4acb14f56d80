#pragma once
// Softmax over the keys a rule names: `sees(options, head, position of the query, key, keys)`, one in each reference of
// a pattern operator.
#include "reference/softmax.hpp"

namespace reference {

template <class N, class Options>
basic_result<N> by_pattern(const tensor<N>& q, const tensor<N>& k, const tensor<N>& v, const Options& options) {
  basic_result<N> into = empty_result(q, v);
  for (idx_t b = 0; b < q.batch(); ++b) {
    const idx_t queries = true_length(options.lengths, options.query_lengths, b, q.length());
    const idx_t keys = true_length(options.lengths, options.key_lengths, b, k.length());
    for (idx_t h = 0; h < q.heads(); ++h)
      for (idx_t i = 0; i < queries; ++i) {
        const idx_t position = i + keys - queries;
        std::vector<N> scores;
        std::vector<idx_t> seen;
        for (idx_t j = 0; j < keys; ++j) {
          if ((options.causal && j > position) || !sees(options, h, position, j, keys)) continue;
          N score = plain_score(options, q, k, b, h, i, j, position - j);
          if (score == -infinity) continue;
          if (options.score) score = options.score(score, b, h, position, j);
          scores.push_back(score);
          seen.push_back(j);
        }
        softmax_row(options, scores, seen, v, b, h, i, into, position);
      }
  }
  return into;
}

/// Which block of `size` a position lies in; positions before the first key lie in negative ones.
inline idx_t block_of(idx_t position, idx_t size) {
  idx_t block = position / size;
  if (block * size > position) --block;
  return block;
}

/// The entry of a table with one row of heads, or one for all; none is -1.
inline idx_t entry(const tensor<idx_t>& table, idx_t head, idx_t row, idx_t column) {
  return table(0, table.heads() == 1 ? 0 : head, row, column);
}

}  // namespace reference
