// This file is compiled once for each level of processors (attn_dispatch in ../CMakeLists.txt), and written as if it were
// compiled once. ATTN_DISPATCH_LEVEL is the level's name.
#include "attend.hpp"

#include <attn/softmax/full_softmax.hpp>

void attend(const float* q, const float* k, const float* v, float* out, attend_shape shape) {
  const auto view = [&](auto* x) { return attn::tensor_view(x, {1, shape.heads, shape.length, shape.dim}); };
  attn::full_softmax(view(q), view(k), view(v), view(out), {.causal = true});
}

const char* attend_level() { return ATTN_DISPATCH_LEVEL; }
