#pragma once
// Softmax over the blocks near the query's (blockwise attention, Qiu 2019), or over the one a table names.
#include "reference/pattern.hpp"

namespace reference {

template <class N>
struct basic_block_options : basic_softmax_options<N> {
  idx_t size = 128, neighbours = 1;
  tensor<idx_t> permutation;  // [1, H|1, blocks, 1], -1 for none
};
using block_options = basic_block_options<double>;

template <class N>
void copy_choices(const block_options& from, basic_block_options<N>& to) {
  copy_choices(static_cast<const softmax_options&>(from), static_cast<basic_softmax_options<N>&>(to));
  to.size = from.size, to.neighbours = from.neighbours, to.permutation = from.permutation;
}

template <class N>
bool sees(const basic_block_options<N>& o, idx_t head, idx_t position, idx_t key, idx_t) {
  const idx_t query_block = block_of(position, o.size), key_block = block_of(key, o.size);
  if (o.permutation.empty()) return std::abs(query_block - key_block) <= o.neighbours;
  return query_block >= 0 && entry(o.permutation, head, query_block, 0) == key_block;
}

template <class N>
basic_result<N> block(const tensor<N>& q, const tensor<N>& k, const tensor<N>& v,
                      const basic_block_options<N>& options = {}) {
  return by_pattern(q, k, v, options);
}

}  // namespace reference
