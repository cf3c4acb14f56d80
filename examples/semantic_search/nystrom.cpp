#include <attn/low_rank/nystrom.hpp>

#include "operators.hpp"

namespace semantic_search { namespace {

attend_function by_landmarks(idx_t landmarks) {
  return [=](auto& q, auto& k, auto& v, auto& out, auto& exec) {
    attn::nystrom(q, k, v, out, {.landmarks = landmarks}, exec);
  };
}
const add_operator nystrom("nystrom", by_landmarks(64)), nystrom_32("nystrom_32", by_landmarks(32));

}}  // namespace semantic_search
