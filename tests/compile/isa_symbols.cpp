// Compiled for several sets of instructions by isa_symbols.cmake: a step over keys in eight bits by tokens in half,
// whose products and conversions are the processor's own where it has them.
#include <attn/softmax/full_softmax_step.hpp>

void step(attn::kv_cache<std::int8_t>& cache, attn::tensor_view<const Eigen::half> x,
          attn::tensor_view<Eigen::half> out) {
  attn::full_softmax_step(cache, x, x, x, out);
}
