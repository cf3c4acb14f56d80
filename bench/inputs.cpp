#include "inputs.hpp"

#include <attn/core/detail/pages.hpp>

#if defined(_WIN32)
#if !defined(NOMINMAX)
#define NOMINMAX
#endif
#include <windows.h>
#else
#include <sys/mman.h>
#endif

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <new>
#include <numbers>
#include <vector>

#include "machine.hpp"

namespace bench {
namespace {

constexpr std::size_t roles = 8;

memory_cost cost;

/// Memory that grows where it is. Address space is reserved for as much as the machine has; a page of it becomes memory
/// when it is first written (on Windows when it is asked for), and stays so. Begins behind a page's first 64 bytes, as
/// large pieces from malloc do. In large pages where there are any, as that in which the machine's bandwidth is
/// measured: in small ones a Zen 4 reads half as fast, and shares of the bandwidth would be shares of another memory's.
template <class S>
class pool {
 public:
  template <class Fill>
  S* at_least(std::size_t count, Fill&& fill) {
    if (!numbers_) reserve();
    if (count > most_) throw std::bad_alloc();
    if (count > filled_) {
#if defined(_WIN32)
      std::byte* const from = reinterpret_cast<std::byte*>(numbers_) - offset;
      if (!VirtualAlloc(from, offset + count * sizeof(S), MEM_COMMIT, PAGE_READWRITE))
        throw std::bad_alloc();
#endif
      const auto begin = std::chrono::steady_clock::now();
      fill(numbers_, filled_, count);
      cost.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      cost.bytes += static_cast<double>((count - filled_) * sizeof(S));
      filled_ = count;
    }
    return numbers_;
  }

 private:
  static constexpr std::size_t offset = 64;

  void reserve() {
    const std::size_t bytes = available_memory_bytes();
    constexpr std::size_t page = attn::detail::large_page;
#if defined(_WIN32)
    void* const memory = VirtualAlloc(nullptr, bytes + page, MEM_RESERVE, PAGE_NOACCESS);
    if (!memory) throw std::bad_alloc();
#else
    void* const memory =
        mmap(nullptr, bytes + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
#endif
    auto* const first = static_cast<std::byte*>(memory) + (page - reinterpret_cast<std::uintptr_t>(memory) % page);
#if defined(MADV_HUGEPAGE)
    madvise(first, bytes, MADV_HUGEPAGE);  // it may fail: then pages are small
#endif
    numbers_ = reinterpret_cast<S*>(first + offset);
    most_ = (bytes - offset) / sizeof(S);
  }

  S* numbers_ = nullptr;
  std::size_t filled_ = 0, most_ = 0;
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
const S* drawn_numbers(role r, std::size_t count) {
  static pool<S> pools[roles];
  return pools[static_cast<std::size_t>(r)].at_least(count, [r](S* numbers, std::size_t begin, std::size_t end) {
    const std::vector<float>& quantile = normal_quantiles();
    constexpr float uniform = 1.F / (1 << 16);
    const std::uint64_t first = (static_cast<std::uint64_t>(r) + 1) << 56;
    // Four numbers from each scrambled count, so that what is drawn later continues what was drawn before.
    for (std::size_t i = begin / 4 * 4; i < end; i += 4) {
      std::uint64_t bits = scrambled(first + (i / 4 + 1) * 0x9e3779b97f4a7c15U);
      for (std::size_t j = i; j < std::min(i + 4, end); ++j, bits >>= 16) {
        const auto at = static_cast<std::uint16_t>(bits);
        numbers[j] = static_cast<S>(r == role::rate        ? uniform * static_cast<float>(at)
                                    : r == role::log_decay ? -0.1F * uniform * static_cast<float>(at)
                                                           : quantile[at]);
      }
    }
  });
}

template <class S>
S* result_memory(std::size_t count, int slot) {
  static pool<S> results[result_slots];
  return results[slot].at_least(
      count, [](S* numbers, std::size_t begin, std::size_t end) { std::fill(numbers + begin, numbers + end, S(0)); });
}

memory_cost memory_so_far() { return cost; }

template const float* drawn_numbers<float>(role, std::size_t);
template const double* drawn_numbers<double>(role, std::size_t);
template const Eigen::half* drawn_numbers<Eigen::half>(role, std::size_t);
template const Eigen::bfloat16* drawn_numbers<Eigen::bfloat16>(role, std::size_t);
template float* result_memory<float>(std::size_t, int);
template double* result_memory<double>(std::size_t, int);
template Eigen::half* result_memory<Eigen::half>(std::size_t, int);
template Eigen::bfloat16* result_memory<Eigen::bfloat16>(std::size_t, int);

}  // namespace bench
