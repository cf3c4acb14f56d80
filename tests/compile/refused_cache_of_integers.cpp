// says: attn: the elements of this cache must be float, double, Eigen::half, Eigen::bfloat16, std::int8_t,
// attn::int8_channels, attn::int4, attn::float8_e4m3 or attn::float8_e5m2
#include <attn/core/kv_cache.hpp>

#ifdef WRONG
using number = int;
#else
using number = std::int8_t;
#endif

attn::idx_t tokens() { return attn::kv_cache<number>({.dim = 64}).tokens(); }
