#pragma once
// A window of blocks, global blocks and random ones (Big Bird, Zaheer 2020).
#include "reference/pattern.hpp"

namespace reference {

template <class N>
struct basic_bigbird_options : basic_softmax_options<N> {
  idx_t size = 64, window_blocks = 3, global_blocks = 1;
  tensor<idx_t> random;  // [1, H|1, blocks, r], -1 for none
};
using bigbird_options = basic_bigbird_options<double>;

template <class N>
void copy_choices(const bigbird_options& from, basic_bigbird_options<N>& to) {
  copy_choices(static_cast<const softmax_options&>(from), static_cast<basic_softmax_options<N>&>(to));
  to.size = from.size, to.window_blocks = from.window_blocks, to.global_blocks = from.global_blocks,
  to.random = from.random;
}

template <class N>
bool sees(const basic_bigbird_options<N>& o, idx_t head, idx_t position, idx_t key, idx_t keys) {
  const idx_t query_block = block_of(position, o.size), key_block = block_of(key, o.size);
  const idx_t blocks = keys / o.size + (keys % o.size != 0);
  const auto is_global = [&](idx_t block) {
    return block >= 0 && (block < o.global_blocks || block >= blocks - o.global_blocks);
  };
  if (is_global(query_block) || is_global(key_block)) return true;
  if (std::abs(query_block - key_block) <= o.window_blocks / 2) return true;
  if (query_block < 0 || o.random.empty()) return false;
  for (idx_t n = 0; n < o.random.dim(); ++n)
    if (entry(o.random, head, query_block, n) == key_block) return true;
  return false;
}

template <class N>
basic_result<N> bigbird(const tensor<N>& q, const tensor<N>& k, const tensor<N>& v,
                        const basic_bigbird_options<N>& options = {}) {
  return by_pattern(q, k, v, options);
}

}  // namespace reference
