#include "machine.hpp"

#include <benchmark/benchmark.h>

#include <attn/core/detail/amx.hpp>
#include <attn/core/detail/bf16_pair.hpp>
#include <attn/core/detail/pages.hpp>
#include <attn/core/detail/prefetch.hpp>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <numeric>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

namespace bench {
namespace {

using packet = Eigen::internal::packet_traits<float>::type;
constexpr std::ptrdiff_t width = Eigen::internal::packet_traits<float>::size;
constexpr bool many_registers = EIGEN_ARCH_DEFAULT_NUMBER_OF_REGISTERS >= 32;
#if defined(EIGEN_VECTORIZE_FMA) || defined(EIGEN_VECTORIZE_NEON)
constexpr bool has_fma = true;
#else
constexpr bool has_fma = false;
#endif

// What is measured reads its operands from here and leaves its result there, so that no compiler can compute it
// beforehand or leave it out. Every thread has a result of its own.
volatile float operands[] = {0.5F, 1.0F};
thread_local volatile float result;

template <class Work>
double seconds_of(Work&& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Enough independent sums to cover the latency of every multiply-add unit, few enough to stay in registers.
constexpr int accumulators = many_registers ? 24 : 12;

/// All of these give how many multiply-adds they made.
template <class T, int... I>
std::ptrdiff_t multiply_add(std::ptrdiff_t rounds, std::integer_sequence<int, I...>) {
  namespace ei = Eigen::internal;
  using lanes = typename ei::packet_traits<T>::type;
  const T a = T(operands[0]), b = T(operands[1]);
  const lanes factor = ei::pset1<lanes>(a), term = ei::pset1<lanes>(b);
  lanes sum[] = {ei::pset1<lanes>(T(I))...};
  for (std::ptrdiff_t round = 0; round < rounds; ++round) {
    if constexpr (has_fma)  // the sum as addend: what Eigen's own assembly for Clang accumulates in place
      ((sum[I] = ei::pmadd(factor, term, sum[I])), ...);
    else  // the sum as factor: a product of constants would be computed once
      ((sum[I] = ei::pmadd(sum[I], factor, term)), ...);
  }
  lanes total = ei::pset1<lanes>(T(0));
  ((total = ei::padd(total, sum[I])), ...);
  result = static_cast<float>(ei::predux(total));
  return rounds * accumulators * attn::detail::width<T>;
}

#if ATTN_HAS_AMX
/// Products of the matrix unit, of whole tiles.
std::ptrdiff_t multiply_tiles(std::ptrdiff_t rounds) {
  namespace amx = attn::detail::amx;
  amx::tile_shapes whole;
  for (int tile = 0; tile < 7; ++tile) whole.rows[tile] = 16;
  amx::configure(whole);
  alignas(64) float numbers[16 * 16];
  std::fill(std::begin(numbers), std::end(numbers), float(operands[1]));
  amx::load<4>(numbers, 64), amx::load<5>(numbers, 64), amx::load<6>(numbers, 64);
  amx::clear<0>(), amx::clear<1>(), amx::clear<2>(), amx::clear<3>();
  for (std::ptrdiff_t round = 0; round < rounds; ++round) {
    amx::multiply_add<0, 4, 5>(), amx::multiply_add<1, 4, 6>();
    amx::multiply_add<2, 4, 5>(), amx::multiply_add<3, 4, 6>();
  }
  amx::store<0>(numbers, 64);
  result = numbers[0];
  amx::release();
  return rounds * 4 * 16 * 16 * 32;
}
#endif

/// The same of pairs of bf16 numbers.
template <int... I>
std::ptrdiff_t multiply_add_pairs(std::ptrdiff_t rounds, std::integer_sequence<int, I...>) {
  namespace ad = attn::detail;
#if ATTN_HAS_AMX
  if (ad::amx::available()) return multiply_tiles(rounds / 4);
#endif
  if constexpr (ad::bf16_products != ad::bf16_make::none) {
    using ad::bf16_pair;
    const auto a = ad::broadcast<bf16_pair>(ad::make_pair<float>(operands[0], operands[1])),
               b = ad::broadcast<bf16_pair>(ad::make_pair<float>(operands[1], operands[0]));
    packet sum[] = {ad::broadcast<float>(float(I))...};
    for (std::ptrdiff_t round = 0; round < rounds; ++round) ((sum[I] = ad::multiply_add<bf16_pair>(a, b, sum[I])), ...);
    packet total = ad::zero<float>();
    ((total = ad::add(total, sum[I])), ...);
    result = ad::sum_lanes(total);
  }
  return rounds * accumulators * 2 * width;
}

constexpr std::ptrdiff_t block = 512;  // numbers, 2 KiB

/// The sum of n numbers, a multiple of 4 blocks. `Streams` equal parts are read in turn, a block of each, while the
/// part's next block is fetched: a processor may have more lines on their way from several places than from one.
template <int Streams>
float sum_of(const float* x, std::ptrdiff_t n) {
  namespace ei = Eigen::internal;
  constexpr std::ptrdiff_t step = 8 * width;
  packet sum[8];
  for (packet& s : sum) s = ei::pset1<packet>(0.F);
  const std::ptrdiff_t part = n / Streams;
  for (std::ptrdiff_t begin = 0; begin < part; begin += block)
    for (std::ptrdiff_t stream = 0; stream < Streams; ++stream)
      for (std::ptrdiff_t i = 0; i < block; i += step) {
        const float* const at = x + stream * part + begin + i;
        attn::detail::prefetch_bytes(reinterpret_cast<const char*>(at + block), step * sizeof(float));
        for (std::ptrdiff_t p = 0; p < 8; ++p) sum[p] = ei::padd(sum[p], ei::ploadu<packet>(at + p * width));
      }
  for (std::ptrdiff_t p = 1; p < 8; ++p) sum[0] = ei::padd(sum[0], sum[p]);
  return ei::predux(sum[0]);
}

double quantile(std::vector<double> values, double share) {
  if (values.empty()) return 0;
  const auto at = values.begin() + static_cast<std::ptrdiff_t>(share * static_cast<double>(values.size() - 1));
  std::ranges::nth_element(values, at);
  return *at;
}

/// Calls work(thread) on `threads` threads, begun together, the caller's among them.
template <class Work>
void at_once(int threads, Work&& work) {
  std::vector<std::thread> others;
  std::barrier start(threads);
  const auto begin = [&](int thread) {
    start.arrive_and_wait();
    work(thread);
  };
  for (int thread = 1; thread < threads; ++thread) others.emplace_back(begin, thread);
  begin(0);
  for (std::thread& other : others) other.join();
}

/// Operations per second of this thread.
double sustained_peak(arithmetic a) {
  constexpr std::ptrdiff_t rounds = 40'000;
  constexpr int trials = 30;  // their median: one that another process interrupts does not count
  std::vector<double> seconds;
  constexpr auto sums = std::make_integer_sequence<int, accumulators>();
  std::ptrdiff_t made = 0;
  for (int trial = 0; trial < trials; ++trial)
    seconds.push_back(seconds_of([&] {
      made = a == arithmetic::of_float    ? multiply_add<float>(rounds, sums)
             : a == arithmetic::of_double ? multiply_add<double>(rounds, sums)
                                          : multiply_add_pairs(rounds, sums);
    }));
  return 2.0 * static_cast<double>(made) / quantile(seconds, 0.5);
}

/// Bytes, and how many processors share them.
std::pair<std::size_t, int> last_level_cache() {
  std::pair<std::size_t, int> largest;
  for (const auto& cache : benchmark::CPUInfo::Get().caches)
    largest = std::max(largest, std::pair(static_cast<std::size_t>(cache.size), cache.num_sharing));
  return largest.first > 0 ? largest : std::pair(std::size_t{32} << 20, 1);
}

/// How many numbers each of `threads` threads reads so that no cache holds them: together four times a last-level cache
/// for those that share one. Where more than 16 do, that is taken for the word of a virtual machine.
std::ptrdiff_t uncached_numbers(int threads) {
  const auto [bytes, sharing] = last_level_cache();
  const std::size_t all = std::clamp(4 * bytes, std::size_t{64} << 20, std::size_t{1} << 30),
                    each = all / static_cast<std::size_t>(std::clamp(threads, 1, std::clamp(sharing, 1, 16))),
                    most = available_memory_bytes() / 8 / static_cast<std::size_t>(threads);
  return static_cast<std::ptrdiff_t>(std::min(each, most) / sizeof(float)) / (4 * block) * (4 * block);
}

/// Bytes per second that `threads` threads read, and read and write back, at once, each memory of its own.
class bandwidths {
 public:
  explicit bandwidths(int threads) : of_thread_(static_cast<std::size_t>(threads)) {
    // Allocated as caches are, in large pages where there are any: small ones take up to a third of the bandwidth.
    const auto n = static_cast<std::size_t>(uncached_numbers(threads));
    at_once(threads, [&](int thread) { of_thread_[static_cast<std::size_t>(thread)].assign(n, 1.0F); });
  }

  void measure() {
    constexpr int trials = 4;  // the fastest counts: nothing but disturbance makes memory slower
    const auto threads = static_cast<int>(of_thread_.size());
    const double bytes = static_cast<double>(of_thread_.size() * of_thread_[0].size() * sizeof(float));
    std::barrier together(threads);
    at_once(threads, [&](int thread) {
      auto& numbers = of_thread_[static_cast<std::size_t>(thread)];
      Eigen::Map<Eigen::ArrayXf> own(numbers.data(), static_cast<std::ptrdiff_t>(numbers.size()));
      const auto rate = [&](double moved, auto&& work) {
        together.arrive_and_wait();
        return moved / seconds_of([&] {
                 work();
                 together.arrive_and_wait();
               });
      };
      double reading = 0, rewriting = 0;
      for (int trial = 0; trial < trials; ++trial) {
        for (const auto sum : {sum_of<1>, sum_of<2>, sum_of<4>})
          reading = std::max(reading, rate(bytes, [&] { result = sum(own.data(), own.size()); }));
        rewriting = std::max(rewriting, rate(2 * bytes, [&] { own *= float(operands[1]); }));
      }
      if (thread == 0) read = std::max(read, reading), rewrite = std::max(rewrite, rewriting);
    });
  }

  double read = 0, rewrite = 0;

 private:
  std::vector<attn::detail::memory_vector<float>> of_thread_;
};

}  // namespace

double machine::peak_quantile(double share, arithmetic a) const { return quantile(peaks_[static_cast<int>(a)], share); }

double machine::peak_of_all(arithmetic a) const {
  return measures_all() ? quantile(all_peaks_[static_cast<int>(a)], 0.5) : threads_ * peak_flops(a);
}

void machine::sample_peak(arithmetic a) {
  peaks_[static_cast<int>(a)].push_back(sustained_peak(a));
  if (!measures_all()) return;
  std::vector<double> each(static_cast<std::size_t>(threads_));
  at_once(threads_, [&](int thread) { each[static_cast<std::size_t>(thread)] = sustained_peak(a); });
  all_peaks_[static_cast<int>(a)].push_back(std::accumulate(each.begin(), each.end(), 0.0));
}

void machine::measure(arithmetic a) {
  bandwidths of_one(1);
  std::optional<bandwidths> of_all;
  if (measures_all()) of_all.emplace(threads_);
  for (int round = 0; round < 6; ++round) {
    sample_peak(a);
    of_one.measure();
    if (of_all) of_all->measure();
  }
  read_bandwidth_ = std::max(read_bandwidth_, of_one.read);
  rewrite_bandwidth_ = std::max(rewrite_bandwidth_, of_one.rewrite);
  if (!of_all) return;
  all_read_bandwidth_ = std::max(all_read_bandwidth_, of_all->read);
  all_rewrite_bandwidth_ = std::max(all_rewrite_bandwidth_, of_all->rewrite);
}

std::size_t last_level_cache_bytes() { return last_level_cache().first; }

std::size_t available_memory_bytes() {
  std::ifstream file("/proc/meminfo");
  std::string line;
  while (std::getline(file, line)) {
    unsigned long long kibibytes = 0;
    if (std::sscanf(line.c_str(), "MemAvailable: %llu", &kibibytes) == 1) return std::size_t{kibibytes} << 10;
  }
  return std::size_t{4} << 30;
}

int processors() { return static_cast<int>(std::max(1U, std::thread::hardware_concurrency())); }

bool matrix_unit_is_refused() {
#if ATTN_HAS_AMX
  return attn::detail::amx::present() && !attn::detail::amx::available();
#else
  return false;
#endif
}

std::string bf16_arithmetic() {
#if ATTN_HAS_AMX
  if (attn::detail::amx::available()) return "AMX";
#endif
  switch (attn::detail::bf16_products) {
    case attn::detail::bf16_make::avx512: return "vdpbf16ps";
    case attn::detail::bf16_make::neon: return "bfdot";
    case attn::detail::bf16_make::model: return "model";
    default: return "float";
  }
}

std::string processor_name() {
  std::ifstream file("/proc/cpuinfo");
  std::string line;
  while (std::getline(file, line))
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  return "unknown processor";
}

}  // namespace bench
