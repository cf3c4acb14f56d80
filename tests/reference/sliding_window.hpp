#pragma once
// Softmax over a dilated window around the query, and over global positions (Longformer, Beltagy 2020).
#include <algorithm>
#include <numeric>

#include "reference/softmax.hpp"

namespace reference {

inline constexpr idx_t unlimited = std::numeric_limits<idx_t>::max();

template <class N>
struct basic_sliding_window_options : basic_softmax_options<N> {
  idx_t left = 128, right = 128;
  std::vector<idx_t> dilation;          // none: 1; one; or one per head
  std::vector<idx_t> global_positions;  // any order
  std::vector<idx_t> global_counts;     // of each batch item; none: every item has all
  tensor<N> q_global, k_global, v_global;
};
using sliding_window_options = basic_sliding_window_options<double>;

template <class N>
void copy_choices(const sliding_window_options& from, basic_sliding_window_options<N>& to) {
  copy_choices(static_cast<const softmax_options&>(from), static_cast<basic_softmax_options<N>&>(to));
  to.left = from.left, to.right = from.right, to.dilation = from.dilation;
  to.global_positions = from.global_positions, to.global_counts = from.global_counts;
}

// Does the query at position p see the key at position j, `offset` = j − p away?
template <class N>
bool in_window(const basic_sliding_window_options<N>& options, idx_t head, idx_t offset) {
  idx_t dilation = 1;
  if (options.dilation.size() == 1) dilation = options.dilation[0];
  if (options.dilation.size() > 1) dilation = options.dilation[static_cast<std::size_t>(head)];
  if (offset % dilation != 0) return false;
  const idx_t steps = offset / dilation;
  return -options.left <= steps && steps <= options.right;
}

template <class N>
bool is_global(const basic_sliding_window_options<N>& options, idx_t b, idx_t position) {
  auto begin = options.global_positions.begin(), end = options.global_positions.end();
  const auto& counts = options.global_counts;
  if (!counts.empty()) {
    begin = std::accumulate(counts.begin(), counts.begin() + b, begin);
    end = begin + counts[static_cast<std::size_t>(b)];
  }
  return std::find(begin, end, position) != end;
}

template <class N>
basic_result<N> sliding_window(const tensor<N>& q, const tensor<N>& k, const tensor<N>& v,
                               const basic_sliding_window_options<N>& options = {}) {
  basic_result<N> into = empty_result(q, v);
  for (idx_t b = 0; b < q.batch(); ++b) {
    const idx_t queries = true_length(options.lengths, options.query_lengths, b, q.length());
    const idx_t keys = true_length(options.lengths, options.key_lengths, b, k.length());
    for (idx_t h = 0; h < q.heads(); ++h)
      for (idx_t i = 0; i < queries; ++i) {
        const idx_t position = i + options.first_position.value_or(keys - queries);
        const bool global_query = is_global(options, b, position);
        const bool own = global_query && !options.q_global.empty();
        const tensor<N>& row_q = own ? options.q_global : q;
        const tensor<N>& row_k = own ? options.k_global : k;
        const tensor<N>& row_v = own ? options.v_global : v;
        std::vector<N> scores;
        std::vector<idx_t> seen;
        for (idx_t j = 0; j < keys; ++j) {
          if (options.causal && j > position) continue;
          if (!global_query && !is_global(options, b, j) && !in_window(options, h, j - position)) continue;
          N score = plain_score(options, row_q, row_k, b, h, i, j, position - j);
          if (score == -infinity) continue;
          if (options.score) score = options.score(score, b, h, position, j);
          scores.push_back(score);
          seen.push_back(j);
        }
        softmax_row(options, scores, seen, row_v, b, h, i, into, position);
      }
  }
  return into;
}

}  // namespace reference
