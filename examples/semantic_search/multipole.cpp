#include <attn/low_rank/multipole.hpp>

#include "operators.hpp"

namespace semantic_search { namespace {

const add_operator multipole("multipole", [](auto& q, auto& k, auto& v, auto& out, auto& exec) {
  attn::multipole(q, k, v, out, {}, exec);  // 192 exact keys, 64 clusters
});
const add_operator multipole_64("multipole_64", [](auto& q, auto& k, auto& v, auto& out, auto& exec) {
  attn::multipole(q, k, v, out, {.exact = 64, .clusters = 32, .probe = 64}, exec);
});

}}  // namespace semantic_search
