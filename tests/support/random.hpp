#pragma once
// Seeded random tensors. The generator is our own, so that a failing case can be
// reproduced with any standard library.
#include <cmath>
#include <cstdint>
#include <numbers>

#include "support/tensor.hpp"

namespace testing {

class random_source {
 public:
  explicit random_source(std::uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 1) {}

  std::uint64_t bits() {  // splitmix64
    std::uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  double uniform() { return (static_cast<double>(bits() >> 11) + 0.5) * 0x1p-53; }  // in (0, 1)
  double normal() {                                                                 // Box–Muller
    const double radius = std::sqrt(-2 * std::log(uniform()));
    return radius * std::cos(2 * std::numbers::pi * uniform());
  }
  idx_t below(idx_t n) { return static_cast<idx_t>(bits() % static_cast<std::uint64_t>(n)); }

 private:
  std::uint64_t state_;
};

inline tensor<double> random_normal(std::uint64_t seed, idx_t batch, idx_t heads, idx_t length, idx_t dim,
                                    double scale = 1) {
  random_source random(seed);
  tensor<double> x(batch, heads, length, dim);
  for (double& value : x.data) value = scale * random.normal();
  return x;
}

inline std::vector<double> random_values(std::uint64_t seed, idx_t count, double scale = 1) {
  return random_normal(seed, 1, 1, 1, count, scale).data;
}

}  // namespace testing
