#include <attn/softmax/sliding_window.hpp>

#include "operators.hpp"

namespace semantic_search { namespace {

attend_function window(idx_t side) {
  return [=](auto& q, auto& k, auto& v, auto& out, auto& exec) {
    attn::sliding_window(q, k, v, out, {.left = side, .right = side}, exec);
  };
}
const add_operator window_128("window_128", window(128)), window_64("window_64", window(64)),
    window_32("window_32", window(32));

}}  // namespace semantic_search
