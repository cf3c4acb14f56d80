#pragma once
// A window of blocks, global blocks and random ones (Big Bird, Zaheer 2020).
#include "reference/pattern.hpp"

namespace reference {

struct bigbird_options : softmax_options {
  index size = 64, window_blocks = 3, global_blocks = 1;
  tensor<index> random;  // [1, H|1, blocks, r], -1 for none
};

inline bool sees(const bigbird_options& o, index head, index position, index key, index keys) {
  const index query_block = block_of(position, o.size), key_block = block_of(key, o.size);
  const index blocks = keys / o.size + (keys % o.size != 0);
  const auto is_global = [&](index block) {
    return block >= 0 && (block < o.global_blocks || block >= blocks - o.global_blocks);
  };
  if (is_global(query_block) || is_global(key_block)) return true;
  if (std::abs(query_block - key_block) <= o.window_blocks / 2) return true;
  if (query_block < 0 || o.random.empty()) return false;
  for (index n = 0; n < o.random.dim(); ++n)
    if (entry(o.random, head, query_block, n) == key_block) return true;
  return false;
}

inline result bigbird(const tensor<double>& q, const tensor<double>& k, const tensor<double>& v,
                      const bigbird_options& options = {}) {
  return by_pattern(q, k, v, options);
}

}  // namespace reference
