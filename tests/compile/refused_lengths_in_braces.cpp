// says: a list in braces is gone before it is read: name a std::vector or std::array
#include <attn/softmax/full_softmax.hpp>

#include <array>

void call(attn::tensor_view<const float> q, attn::tensor_view<float> out) {
#ifdef WRONG
  attn::full_softmax(q, q, q, out, {.lengths = {1, 2}});
#else
  const std::array<attn::idx_t, 2> lengths = {1, 2};
  attn::full_softmax(q, q, q, out, {.lengths = lengths});
#endif
}
