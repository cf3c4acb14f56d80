// says: the elements of a cache must be of the type of q, k and v
#include <attn/softmax/full_softmax_step.hpp>

#ifdef WRONG
using number = double;
#else
using number = float;
#endif
using view = attn::tensor_view<number>;

void call(attn::kv_cache<std::int8_t>& cache, const view& q, const view& k, const view& v, const view& out) {
  attn::full_softmax_step(cache, q, k, v, out);
}
