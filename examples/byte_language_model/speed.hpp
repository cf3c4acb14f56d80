// Where the time of training goes, and what the machine could do in it.
#pragma once

#include <attn/attn.hpp>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <utility>

namespace byte_model {

using attn::execution, attn::idx_t;

// std::vector, indexed by index like all else here.
template <class T>
struct list : std::vector<T> {
  using std::vector<T>::vector;
  T& operator[](idx_t n) { return this->data()[n]; }
  const T& operator[](idx_t n) const { return this->data()[n]; }
};

inline double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Adds the time of its life to a sum.
struct stopwatch {
  explicit stopwatch(double& time) : sum(time) {}
  stopwatch(const stopwatch&) = delete;
  ~stopwatch() { sum += seconds() - start; }

 private:
  double& sum;
  double start = seconds();
};

// Seconds of training; what the operator takes is part of what the blocks take.
struct times {
  double embedding = 0, blocks = 0, mixing = 0, logits = 0, loss = 0, update = 0;
};

inline double median(list<double> numbers) {
  if (numbers.empty()) return 0;
  std::nth_element(numbers.begin(), numbers.begin() + std::ssize(numbers) / 2, numbers.end());
  return numbers[std::ssize(numbers) / 2];
}

// Multiplies and adds in registers; what it reads and writes keeps the compiler from doing so beforehand.
template <int... I>
void multiply_and_add(idx_t rounds, std::integer_sequence<int, I...>) {
  namespace ei = Eigen::internal;
  using packet = ei::packet_traits<float>::type;
  static volatile float factors[] = {0.5F, 1.0F};
  [[maybe_unused]] thread_local volatile float result;
  const float a = factors[0], b = factors[1];
  const packet x = ei::pset1<packet>(a), y = ei::pset1<packet>(b);
  packet sum[] = {ei::pset1<packet>(float(I))...};
  for (idx_t round = 0; round < rounds; ++round) ((sum[I] = ei::pmadd(x, y, sum[I])), ...);
  packet total = ei::pset1<packet>(0.0F);
  ((total = ei::padd(total, sum[I])), ...);
  result = ei::predux(total);
}

// Operations a second when all threads do nothing else. It takes some milliseconds.
inline double peak(execution& exec) {
  constexpr int accumulators = EIGEN_ARCH_DEFAULT_NUMBER_OF_REGISTERS >= 32 ? 24 : 12;
  constexpr idx_t rounds = 40000, operations = 2 * rounds * accumulators * Eigen::internal::packet_traits<float>::size;
  list<double> rates(static_cast<std::size_t>(exec.threads()));
  exec.for_each(exec.threads(), [&](idx_t task, int) {
    list<double> trials;
    for (int n = 0; n < 15; ++n) {
      const double start = seconds();
      multiply_and_add(rounds, std::make_integer_sequence<int, accumulators>());
      trials.push_back(double(operations) / (seconds() - start));
    }
    rates[task] = median(trials);
  });
  return std::accumulate(rates.begin(), rates.end(), 0.);
}

}  // namespace byte_model
