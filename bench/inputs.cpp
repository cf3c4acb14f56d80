#include "inputs.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <vector>

namespace bench {
namespace {

template <class S>
struct pool {
  Eigen::Array<S, Eigen::Dynamic, 1> memory;  // aligned for the widest vectors, as a caller's Eigen matrices are
  template <class Fill>
  S* at_least(std::size_t count, Fill&& fill) {
    if (count > static_cast<std::size_t>(memory.size())) {
      memory.resize(0);  // given back first: two of the longest might not fit
      memory.resize(static_cast<Eigen::Index>(count));
      fill(memory);
    }
    return memory.data();
  }
};

/// 65536 quantiles of the normal distribution. Looking up random ones is as good as drawing from it here, and many
/// times faster than logarithms and sines, which matters for a few hundred million numbers.
const std::vector<float>& normal_quantiles() {
  static const std::vector<float> table = [] {
    constexpr int size = 1 << 16;
    std::vector<float> t(size);
    double x = -4.3;
    for (int i = 0; i < size; ++i) {
      const double target = (i + 0.5) / size;
      for (int newton = 0; newton < 6; ++newton) {
        const double probability = 0.5 * std::erfc(-x / std::numbers::sqrt2);
        const double density = std::exp(-x * x / 2) / std::sqrt(2 * std::numbers::pi);
        x += (target - probability) / density;
      }
      t[static_cast<std::size_t>(i)] = static_cast<float>(x);
    }
    return t;
  }();
  return table;
}

std::uint64_t scrambled(std::uint64_t x) {  // the finaliser of SplitMix64
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
}

}  // namespace

template <class S>
const S* normal_numbers(role r, std::size_t count) {
  static pool<S> pools[5];
  return pools[static_cast<std::size_t>(r)].at_least(count, [r](auto& memory) {
    const std::vector<float>& quantile = normal_quantiles();
    std::uint64_t state = (static_cast<std::uint64_t>(r) + 1) << 56;
    for (Eigen::Index i = 0; i < memory.size(); i += 4) {
      std::uint64_t bits = scrambled(state += 0x9e3779b97f4a7c15U);
      for (Eigen::Index j = i; j < std::min(i + 4, memory.size()); ++j, bits >>= 16)
        memory[j] = static_cast<S>(quantile[bits & 0xffff]);
    }
  });
}

template <class S>
S* result_memory(std::size_t count, int slot) {
  static pool<S> results[result_slots];
  return results[slot].at_least(count, [](auto& memory) { memory.setZero(); });
}

template const float* normal_numbers<float>(role, std::size_t);
template const double* normal_numbers<double>(role, std::size_t);
template const Eigen::half* normal_numbers<Eigen::half>(role, std::size_t);
template const Eigen::bfloat16* normal_numbers<Eigen::bfloat16>(role, std::size_t);
template float* result_memory<float>(std::size_t, int);
template double* result_memory<double>(std::size_t, int);
template Eigen::half* result_memory<Eigen::half>(std::size_t, int);
template Eigen::bfloat16* result_memory<Eigen::bfloat16>(std::size_t, int);

}  // namespace bench
