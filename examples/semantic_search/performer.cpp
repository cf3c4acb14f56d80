#include <attn/kernel/performer.hpp>

#include "operators.hpp"

namespace semantic_search { namespace {

const auto of_64 = attn::draw_features<float>(256, 64, {.seed = 7}),
           of_128 = attn::draw_features<float>(256, 128, {.seed = 7});

const add_operator performer("performer", [](auto& q, auto& k, auto& v, auto& out, auto& exec) {
  attn::performer(q, k, v, out, q.extent(3) == 64 ? of_64 : of_128, {.center_keys = true}, exec);
});

}}  // namespace semantic_search
