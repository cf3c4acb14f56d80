#pragma once
// What the tests with random calls have in common: fuzz.cpp, fuzz_options.cpp.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <iostream>
#include <limits>
#include <string>

#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/refusal.hpp"
#include "support/tensor.hpp"

namespace testing {

template <class List>
auto one_of(random_source& random, const List& list) {
  return list[static_cast<std::size_t>(random.below(std::ssize(list)))];
}

inline double largest(const auto& x) {
  double most = 0;
  for (const auto value : x.data) most = std::max(most, std::abs(static_cast<double>(value)));
  return most;
}

// Deviation of a result from the reference, in tolerances: of each number, relative to the largest of its kind. Results
// that are sums of values which cancel are as exact as the values are, of size `size`, and those of terms that cancel
// as exact as these: `of_terms` of their size.
template <class T>
double deviation(const tensor<T>& actual, const tensor<double>& wanted, double size, double tolerance,
                 const tensor<double>& terms = {}, double of_terms = 0) {
  if (actual.extents != wanted.extents) return std::numeric_limits<double>::infinity();
  double most = 0;
  const double unit = tolerance * std::max({size, largest(wanted), 1.0});
  for (std::size_t n = 0; n < actual.data.size(); ++n) {
    const double a = static_cast<double>(actual.data[n]), e = wanted.data[n];
    if (std::isinf(e) && a == e) continue;
    const double rounding = terms.data.empty() ? 0 : of_terms * terms.data[n];
    const double error = std::max(std::abs(a - e) - rounding, 0.0) / unit;
    most = std::isfinite(error) ? std::max(most, error) : std::numeric_limits<double>::infinity();
  }
  return most;
}
// The laws bound the norm of errors at their shapes; some number of a million calls is further off.
inline constexpr double allowed_deviation = 3;

struct fuzz_tally {
  idx_t calls = 0, refused = 0;
  double worst = 0;
  std::string worst_at{};

  std::string judge(double error, const std::string& at) {
    if (error > worst) worst = error, worst_at = at;
    return error <= allowed_deviation ? "" : "off by " + std::to_string(error) + " tolerances";
  }
};

inline std::uint64_t number_from(const char* variable, std::uint64_t otherwise) {
  const char* const text = std::getenv(variable);
  return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

// run(random, tally) makes a call and says what is wrong with its outcome, and which call it was; nothing is wrong
// where the first is empty. As many calls as ATTN_FUZZ_CALLS says; else `calls`, or as many as there are `seconds` for.
template <class Run>
void fuzz(std::uint64_t calls, double seconds, const Run& run) {
  const std::uint64_t asked = number_from("ATTN_FUZZ_CALLS", 0), seed = number_from("ATTN_FUZZ_SEED", 1),
                      first = number_from("ATTN_FUZZ_FIRST", 0);
  fuzz_tally tally;
  int found = 0;
  const std::clock_t begin = std::clock();
  for (std::uint64_t n = first; n < first + (asked ? asked : calls) && found < 20; ++n) {
    if (!asked && static_cast<double>(std::clock() - begin) > seconds * CLOCKS_PER_SEC) break;
    random_source random(seed * 1000003 + n);
    const auto [what, which] = run(random, tally);
    if (what.empty()) continue;
    ++found;
    INFO("case " << n << " of seed " << seed << ": " << which);
    FAIL_CHECK(what);
  }
  if (asked) {
    std::cout << tally.calls << " calls, " << tally.refused << " refused; worst " << tally.worst
              << " tolerances: " << tally.worst_at << "\n";
    return;
  }
  CHECK(tally.calls > 100);
  CHECK(tally.refused > 10);
}

}  // namespace testing
