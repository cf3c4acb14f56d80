// says: attn: the elements of this cache must be float, double, Eigen::half or Eigen::bfloat16
#include <attn/softmax/topk_blocks_step.hpp>

#ifdef WRONG
using number = std::int8_t;
#else
using number = Eigen::half;
#endif

attn::idx_t tokens() { return attn::topk_blocks_cache<number>({.dim = 64}).tokens(); }
