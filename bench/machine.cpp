#include "machine.hpp"

#include <benchmark/benchmark.h>

#include <attn/core/detail/eigen.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <utility>

namespace bench {
namespace {

using packet_traits = Eigen::internal::packet_traits<float>;
using packet = packet_traits::type;
constexpr std::ptrdiff_t width = packet_traits::size;
constexpr bool many_registers = EIGEN_ARCH_DEFAULT_NUMBER_OF_REGISTERS >= 32;

/// Of the fastest of `trials` trials, if it beats `best`.
template <class Work>
void improve(double& best, int trials, Work&& work) {
  for (int trial = 0; trial < trials; ++trial) {
    const auto begin = std::chrono::steady_clock::now();
    work();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
}

// Enough independent sums to cover the latency of every multiply-add unit, few enough to stay in registers.
constexpr int accumulators = many_registers ? 24 : 12;

template <int... I>
void multiply_add(std::ptrdiff_t rounds, packet factor, packet term, float* out, std::integer_sequence<int, I...>) {
  namespace ei = Eigen::internal;
  packet sum[] = {ei::pset1<packet>(float(I))...};
  for (std::ptrdiff_t round = 0; round < rounds; ++round) ((sum[I] = ei::pmadd(sum[I], factor, term)), ...);
  (ei::pstoreu(out + I * width, sum[I]), ...);
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

}  // namespace

double measure_peak_flops() {
  float factor = 0.5F, term = 1;
  benchmark::DoNotOptimize(factor);
  benchmark::DoNotOptimize(term);
  float out[accumulators * width];
  constexpr std::ptrdiff_t rounds = 40'000;
  double seconds = 1e30;
  improve(seconds, 100, [&] {
    multiply_add(rounds, Eigen::internal::pset1<packet>(factor), Eigen::internal::pset1<packet>(term), out,
                 std::make_integer_sequence<int, accumulators>());
    benchmark::DoNotOptimize(out);
    benchmark::ClobberMemory();
  });
  return 2.0 * static_cast<double>(rounds * accumulators * width) / seconds;
}

machine measure_machine() {
  const std::size_t bytes =
      std::clamp<std::size_t>(4 * last_level_cache_bytes(), std::size_t{64} << 20,
                              std::min<std::size_t>(available_memory_bytes() / 8, std::size_t{1} << 30));
  const auto n = static_cast<std::ptrdiff_t>(bytes / sizeof(float));
  const Eigen::ArrayXf x = Eigen::ArrayXf::Ones(n);
  Eigen::ArrayXf y = Eigen::ArrayXf::Zero(n);  // touched, so that no trial pays for the pages
  double peak = 0, read = 1e30, copy = 1e30;
  for (int round = 0; round < 6; ++round) {  // in turns: a disturbance then spoils a part of each, not all of one
    peak = std::max(peak, measure_peak_flops());
    improve(read, 5, [&] { benchmark::DoNotOptimize(sum_of(x.data(), n)); });
    improve(copy, 5, [&] {
      y = x * 3.F;
      benchmark::DoNotOptimize(y.data());
      benchmark::ClobberMemory();
    });
  }
  return {peak, 2.0 * static_cast<double>(bytes) / copy, static_cast<double>(bytes) / read};
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
