#pragma once
// Softmax over a dilated window around the query, and over global positions (Longformer, Beltagy 2020).
#include <algorithm>

#include "reference/softmax.hpp"

namespace reference {

inline constexpr index unlimited = std::numeric_limits<index>::max();

struct sliding_window_options : softmax_options {
  index left = 128, right = 128;
  std::vector<index> dilation;          // none: 1; one; or one per head
  std::vector<index> global_positions;  // any order
  tensor<double> q_global, k_global, v_global;
};

// Does the query at position p see the key at position j, `offset` = j − p away?
inline bool in_window(const sliding_window_options& options, index head, index offset) {
  index dilation = 1;
  if (options.dilation.size() == 1) dilation = options.dilation[0];
  if (options.dilation.size() > 1) dilation = options.dilation[static_cast<std::size_t>(head)];
  if (offset % dilation != 0) return false;
  const index steps = offset / dilation;
  return -options.left <= steps && steps <= options.right;
}

inline bool is_global(const sliding_window_options& options, index position) {
  const auto& list = options.global_positions;
  return std::find(list.begin(), list.end(), position) != list.end();
}

inline result sliding_window(const tensor<double>& q, const tensor<double>& k, const tensor<double>& v,
                             const sliding_window_options& options = {}) {
  result into = empty_result(q, v);
  for (index b = 0; b < q.batch(); ++b) {
    const index queries = true_length(options.lengths, options.query_lengths, b, q.length());
    const index keys = true_length(options.lengths, options.key_lengths, b, k.length());
    for (index h = 0; h < q.heads(); ++h)
      for (index i = 0; i < queries; ++i) {
        const index position = i + keys - queries;
        const bool global_query = position < keys && is_global(options, position);
        const bool own = global_query && !options.q_global.empty();
        const tensor<double>& row_q = own ? options.q_global : q;
        const tensor<double>& row_k = own ? options.k_global : k;
        const tensor<double>& row_v = own ? options.v_global : v;
        std::vector<double> scores;
        std::vector<index> seen;
        for (index j = 0; j < keys; ++j) {
          if (options.causal && j > position) continue;
          if (!global_query && !is_global(options, j) && !in_window(options, h, j - position)) continue;
          double score = plain_score(options, row_q, row_k, b, h, i, j, position - j);
          if (options.score) score = options.score(score, b, h, position, j);
          scores.push_back(score);
          seen.push_back(j);
        }
        softmax_row(options, scores, seen, row_v, b, h, i, into);
      }
  }
  return into;
}

}  // namespace reference
