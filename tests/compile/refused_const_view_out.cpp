// says: out must be writable
#include <attn/softmax/sliding_window.hpp>

#ifdef WRONG
using result = attn::tensor_view<const float>;
#else
using result = attn::tensor_view<float>;
#endif

void call(attn::tensor_view<const float> q, result out) { attn::sliding_window(q, q, q, out, {.left = 4}); }
