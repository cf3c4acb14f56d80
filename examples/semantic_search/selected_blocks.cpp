#include <attn/core/tensor.hpp>
#include <attn/softmax/antidiagonal_blocks.hpp>
#include <attn/softmax/selected_keys.hpp>

#include <algorithm>

#include "operators.hpp"

namespace semantic_search { namespace {

// Half of the tokens, by blocks of 16 that each block of queries chooses (XAttention).
const add_operator antidiagonal("antidiagonal", [](auto& q, auto& k, auto& v, auto& out, auto& exec) {
  const auto count = std::max<attn::idx_t>(3, (k.extent(2) + 31) / 32);
  attn::tensor<std::int32_t> blocks({q.extent(0), q.extent(1), q.extent(2), count});
  attn::antidiagonal_blocks(q, k, blocks, {.block = 16, .stride = 8, .threshold = 1}, exec);
  attn::selected_keys(q, k, v, out, blocks, {.block = 16}, exec);
});

}}  // namespace semantic_search
