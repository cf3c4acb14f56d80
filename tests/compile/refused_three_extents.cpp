// says: expected one extent, and one stride, for each axis
#include <attn/core/tensor_view.hpp>

#ifdef WRONG
attn::tensor_view<float> view(float* p) { return attn::tensor_view<float>(p, {6, 5, 8}); }
#else
attn::tensor_view<float> view(float* p) { return attn::tensor_view<float>(p, {1, 6, 5, 8}); }
#endif
