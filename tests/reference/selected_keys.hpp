#pragma once
// Softmax over the keys that a list names for every query: keys, or blocks of them.
#include <algorithm>

#include "reference/softmax.hpp"

namespace reference {

template <class N>
struct basic_selected_keys_options : basic_softmax_options<N> {
  tensor<idx_t> indices;  // [B|1, H|Hkv|1, Lq, n]: -1 is none
  idx_t block = 1;
};
using selected_keys_options = basic_selected_keys_options<double>;

template <class N>
void copy_choices(const selected_keys_options& from, basic_selected_keys_options<N>& to) {
  copy_choices(static_cast<const softmax_options&>(from), static_cast<basic_softmax_options<N>&>(to));
  to.indices = from.indices, to.block = from.block;
}

// Whether the list of query i of head h names key j.
inline bool names(const tensor<idx_t>& indices, idx_t block, idx_t heads, idx_t kv_heads, idx_t b, idx_t h, idx_t i,
                  idx_t j) {
  const idx_t item = indices.batch() == 1 ? 0 : b;
  const idx_t list = indices.heads() == 1 ? 0 : indices.heads() == heads ? h : h / (heads / kv_heads);
  for (idx_t n = 0; n < indices.dim(); ++n)
    if (const idx_t name = indices(item, list, i, n); name >= 0 && name == j / block) return true;
  return false;
}

template <class N>
basic_result<N> selected_keys(const tensor<N>& q, const tensor<N>& k, const tensor<N>& v,
                              const basic_selected_keys_options<N>& o) {
  basic_result<N> into = empty_result(q, v);
  for (idx_t b = 0; b < q.batch(); ++b) {
    const idx_t queries = true_length(o.lengths, o.query_lengths, b, q.length());
    const idx_t keys = true_length(o.lengths, o.key_lengths, b, k.length());
    for (idx_t h = 0; h < q.heads(); ++h)
      for (idx_t i = 0; i < queries; ++i) {
        const idx_t position = i + first_of(o, b, queries, keys);
        std::vector<N> scores;
        std::vector<idx_t> seen;
        for (idx_t j = 0; j < keys; ++j) {
          if (!names(o.indices, o.block, q.heads(), k.heads(), b, h, i, j) || hides_later(o, position, j)) continue;
          N score = plain_score(o, q, k, b, h, i, j, position - j);
          if (score == -infinity) continue;
          if (o.score) score = o.score(score, b, h, position, j);
          scores.push_back(score), seen.push_back(j);
        }
        softmax_row(o, scores, seen, v, b, h, i, into, position);
      }
  }
  return into;
}

}  // namespace reference
