#pragma once
// Cases of the attention-free family: keys and biases of any size, some biases of −infinity.
#include "support/call_aft.hpp"

namespace testing {

struct aft_shape {
  idx_t batch = 2, heads = 3, length = 65, dim = 16;
  double keys = 1, biases = 1, masked = 0.1;  // standard deviations, or half the range where above 5; share of masks
  std::uint64_t seed = 1;
};

inline void spread(tensor<double>& x, double size, std::uint64_t seed) {
  random_source random(seed);
  for (double& value : x.data) value = size > 5 ? size * (2 * random.uniform() - 1) : size * random.normal();
}

template <class Options>
problem<Options> aft_problem(const aft_shape& s) {
  problem<Options> p;
  p.q = random_normal(s.seed, s.batch, s.heads, s.length, s.dim);
  p.v = random_normal(s.seed + 1, s.batch, s.heads, s.length, s.dim);
  p.k = p.q;
  spread(p.k, s.keys, s.seed + 2);
  return p;
}

inline tensor<double> aft_biases(const aft_shape& s, idx_t heads, idx_t rows, idx_t columns) {
  tensor<double> w(1, heads, rows, columns);
  spread(w, s.biases, s.seed + 3);
  random_source random(s.seed + 4);
  for (double& value : w.data)
    if (random.uniform() < s.masked) value = -std::numeric_limits<double>::infinity();
  return w;
}

}  // namespace testing
