// says: attn: a sliding_window_cache has no elements of attn::int4 or attn::int8_channels
#include <attn/softmax/sliding_window_step.hpp>

#ifdef WRONG
using number = attn::int4;
#else
using number = std::int8_t;
#endif

attn::idx_t tokens() { return attn::sliding_window_cache<number>({.dim = 64}, {.left = 16}).tokens(); }
