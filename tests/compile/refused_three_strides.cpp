// says: expected one extent, and one stride, for each axis
#include <attn/core/tensor_view.hpp>

#ifdef WRONG
attn::tensor_view<float> view(float* p) { return attn::tensor_view<float>(p, {1, 6, 5, 8}, {40, 8, 1}); }
#else
attn::tensor_view<float> view(float* p) { return attn::tensor_view<float>(p, {1, 6, 5, 8}, {0, 40, 8, 1}); }
#endif
