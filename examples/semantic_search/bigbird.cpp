#include <attn/softmax/bigbird.hpp>

#include "operators.hpp"

namespace semantic_search { namespace {

const add_operator bigbird("bigbird", [](auto& q, auto& k, auto& v, auto& out, auto& exec) {
  const auto random = attn::draw_random_blocks((q.extent(2) + 31) / 32, 3, {.seed = 7});
  attn::bigbird(q, k, v, out, {.size = 32, .random = random}, exec);
});

}}  // namespace semantic_search
