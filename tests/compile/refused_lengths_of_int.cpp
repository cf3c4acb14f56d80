// says: lengths, positions and dilations are lists of attn::idx_t
#include <attn/softmax/full_softmax.hpp>

#include <vector>

#ifdef WRONG
using number = int;
#else
using number = attn::idx_t;
#endif

void call(attn::tensor_view<const float> q, attn::tensor_view<float> out, const std::vector<number>& lengths) {
  attn::full_softmax(q, q, q, out, {.lengths = lengths});
}
