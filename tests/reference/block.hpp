#pragma once
// Softmax over the blocks near the query's (blockwise attention, Qiu 2019), or over the one a table names.
#include "reference/pattern.hpp"

namespace reference {

struct block_options : softmax_options {
  index size = 128, neighbours = 1;
  tensor<index> permutation;  // [1, H|1, blocks, 1], -1 for none
};

inline bool sees(const block_options& o, index head, index position, index key, index) {
  const index query_block = block_of(position, o.size), key_block = block_of(key, o.size);
  if (o.permutation.empty()) return std::abs(query_block - key_block) <= o.neighbours;
  return query_block >= 0 && entry(o.permutation, head, query_block, 0) == key_block;
}

inline result block(const tensor<double>& q, const tensor<double>& k, const tensor<double>& v,
                    const block_options& options = {}) {
  return by_pattern(q, k, v, options);
}

}  // namespace reference
