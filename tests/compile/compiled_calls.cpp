// Calls of operators for compiled.py; with ATTN_TEST_MORE_CALLS a step over a cache in codes and a gradient, too.
#include <attn/kernel/linear.hpp>
#include <attn/softmax/full_softmax_backward.hpp>
#include <attn/softmax/full_softmax_step.hpp>

#include <cstdio>

int main() {
  const Eigen::MatrixXf q = Eigen::MatrixXf::Random(100, 16), k = Eigen::MatrixXf::Random(100, 16),
                        v = Eigen::MatrixXf::Random(100, 16);
  Eigen::MatrixXf full(100, 16), linear(100, 16);
  attn::full_softmax(q, k, v, full, {.causal = true});
  attn::linear(q, k, v, linear);
#ifdef ATTN_TEST_MORE_CALLS
  attn::kv_cache<std::int8_t> cache({.heads = 1, .dim = 16});
  attn::full_softmax_step(cache, q, k, v, full);
  attn::full_softmax_backward(q, k, v, full, v, {.q = linear}, {.causal = true});
#endif
  std::printf("%.9g %.9g\n", full.sum(), linear.sum());
}
