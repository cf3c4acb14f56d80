#include "machine.hpp"

#include <benchmark/benchmark.h>

#include <attn/core/detail/eigen.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <utility>
#include <vector>

namespace bench {
namespace {

using packet_traits = Eigen::internal::packet_traits<float>;
using packet = packet_traits::type;
constexpr std::ptrdiff_t width = packet_traits::size;
constexpr bool many_registers = EIGEN_ARCH_DEFAULT_NUMBER_OF_REGISTERS >= 32;
#if defined(EIGEN_VECTORIZE_FMA) || defined(EIGEN_VECTORIZE_NEON)
constexpr bool has_fma = true;
#else
constexpr bool has_fma = false;
#endif

// What is measured reads its operands from here and leaves its result there, so that no compiler can compute it
// beforehand or leave it out.
volatile float operands[] = {0.5F, 1.0F};
volatile float result;

template <class Work>
double seconds_of(Work&& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Enough independent sums to cover the latency of every multiply-add unit, few enough to stay in registers.
constexpr int accumulators = many_registers ? 24 : 12;

template <int... I>
void multiply_add(std::ptrdiff_t rounds, std::integer_sequence<int, I...>) {
  namespace ei = Eigen::internal;
  const float a = operands[0], b = operands[1];
  const packet factor = ei::pset1<packet>(a), term = ei::pset1<packet>(b);
  packet sum[] = {ei::pset1<packet>(float(I))...};
  for (std::ptrdiff_t round = 0; round < rounds; ++round) {
    if constexpr (has_fma)  // the sum as addend: what Eigen's own assembly for Clang accumulates in place
      ((sum[I] = ei::pmadd(factor, term, sum[I])), ...);
    else  // the sum as factor: a product of constants would be computed once
      ((sum[I] = ei::pmadd(sum[I], factor, term)), ...);
  }
  packet total = ei::pset1<packet>(0.0F);
  ((total = ei::padd(total, sum[I])), ...);
  result = ei::predux(total);
}

float sum_of(const float* x, std::ptrdiff_t n) {
  namespace ei = Eigen::internal;
  packet sum[8];
  for (packet& s : sum) s = ei::pset1<packet>(0.F);
  for (std::ptrdiff_t i = 0; i + 8 * width <= n; i += 8 * width)
    for (std::ptrdiff_t p = 0; p < 8; ++p) sum[p] = ei::padd(sum[p], ei::ploadu<packet>(x + i + p * width));
  for (std::ptrdiff_t p = 1; p < 8; ++p) sum[0] = ei::padd(sum[0], sum[p]);
  return ei::predux(sum[0]);
}

double quantile(std::vector<double> values, double share) {
  if (values.empty()) return 0;
  const auto at = values.begin() + static_cast<std::ptrdiff_t>(share * static_cast<double>(values.size() - 1));
  std::ranges::nth_element(values, at);
  return *at;
}

}  // namespace

double machine::peak_quantile(double share) const { return quantile(peaks_, share); }

void machine::sample_peak() {
  constexpr std::ptrdiff_t rounds = 40'000;
  constexpr int trials = 30;  // their median: one that another process interrupts does not count
  std::vector<double> seconds;
  for (int trial = 0; trial < trials; ++trial)
    seconds.push_back(seconds_of([] { multiply_add(rounds, std::make_integer_sequence<int, accumulators>()); }));
  peaks_.push_back(2.0 * static_cast<double>(rounds * accumulators * width) / quantile(seconds, 0.5));
}

void machine::measure() {
  const std::size_t bytes =
      std::clamp<std::size_t>(4 * last_level_cache_bytes(), std::size_t{64} << 20,
                              std::min<std::size_t>(available_memory_bytes() / 8, std::size_t{1} << 30));
  const auto n = static_cast<std::ptrdiff_t>(bytes / sizeof(float));
  Eigen::ArrayXf x = Eigen::ArrayXf::Ones(n);
  double read = 1e30, rewrite = 1e30;  // the fastest of many: nothing but disturbance makes memory slower
  for (int round = 0; round < 6; ++round) {
    sample_peak();
    for (int trial = 0; trial < 5; ++trial) {
      read = std::min(read, seconds_of([&] { result = sum_of(x.data(), n); }));
      rewrite = std::min(rewrite, seconds_of([&] { x *= float(operands[1]); }));
    }
  }
  result = x[n / 2];
  read_bandwidth_ = std::max(read_bandwidth_, static_cast<double>(bytes) / read);
  rewrite_bandwidth_ = std::max(rewrite_bandwidth_, 2.0 * static_cast<double>(bytes) / rewrite);
}

std::size_t last_level_cache_bytes() {
  int largest = 0;
  for (const auto& cache : benchmark::CPUInfo::Get().caches) largest = std::max(largest, cache.size);
  return largest > 0 ? static_cast<std::size_t>(largest) : std::size_t{32} << 20;
}

std::size_t available_memory_bytes() {
  std::ifstream file("/proc/meminfo");
  std::string line;
  while (std::getline(file, line)) {
    unsigned long long kibibytes = 0;
    if (std::sscanf(line.c_str(), "MemAvailable: %llu", &kibibytes) == 1) return std::size_t{kibibytes} << 10;
  }
  return std::size_t{4} << 30;
}

std::string processor_name() {
  std::ifstream file("/proc/cpuinfo");
  std::string line;
  while (std::getline(file, line))
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  return "unknown processor";
}

}  // namespace bench
