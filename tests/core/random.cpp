// random_numbers: the numbers the definition gives, everywhere, and that they are distributed as they should be.
#include "support/catch.hpp"

#include <attn/core/random.hpp>

#include <cmath>
#include <limits>
#include <vector>

namespace {

// The definition in exact arithmetic (40 digits), rounded: a last bit may differ, never more.
TEST_CASE("a seed gives the numbers of the definition", "[random]") {
  const double seed_7[] = {0.145331823444811126, -0.336380619789980969, 1.65538232318232962, 1.34206371242933652};
  const double stream_1[] = {0.557116687537673697, -0.110688078842056408, 0.402284794493695577, -1.0132060772823762};
  attn::random_numbers first(7), second(7, 1);
  for (int n = 0; n < 4; ++n) {
    CHECK(std::abs(first.normal() - seed_7[n]) <= 0x1p-52);
    CHECK(std::abs(second.normal() - stream_1[n]) <= 0x1p-52);
  }
}

// A seed made for it: the mixing is a bijection. Where the corner of the square is added up in signed integers, that
// overflows.
TEST_CASE("the farthest point outside the circle is passed over", "[random]") {
  const std::uint64_t seed = 0xa69bbb4610be7db7;
  CHECK(attn::random_numbers(seed).bits() == 0x8000000080000000);  // -1, -1
  attn::random_numbers numbers(seed), next(seed);
  next.bits();
  CHECK(numbers.normal() == next.normal());
}

// 8 standard errors of each moment: fails by chance less than once in 10^14.
TEST_CASE("normal numbers have the moments of the normal distribution", "[random]") {
  attn::random_numbers numbers(1);
  const int count = 1 << 20;
  double sums[5] = {};
  for (int n = 0; n < count; ++n) {
    double power = 1;
    const double x = numbers.normal();
    for (double& sum : sums) sum += power, power *= x;
  }
  const double moments[] = {1, 0, 1, 0, 3}, deviations[] = {0, 1, std::sqrt(2.0), std::sqrt(15.0), std::sqrt(96.0)};
  for (int p = 1; p < 5; ++p)
    CHECK(std::abs(sums[p] / count - moments[p]) <= 8 * deviations[p] / std::sqrt(double(count)));
}

TEST_CASE("whole numbers below n are equally likely", "[random]") {
  for (attn::idx_t n : {attn::idx_t(1), attn::idx_t(3), attn::idx_t(10), attn::idx_t(64)}) {
    attn::random_numbers numbers(2, static_cast<std::uint64_t>(n));
    const int draws = 1 << 16;
    std::vector<int> seen(static_cast<std::size_t>(n));
    for (int i = 0; i < draws; ++i) {
      const attn::idx_t x = numbers.below(n);
      REQUIRE(x >= 0);
      REQUIRE(x < n);
      ++seen[static_cast<std::size_t>(x)];
    }
    const double mean = double(draws) / double(n);
    for (int count : seen) CHECK(std::abs(count - mean) <= 8 * std::sqrt(mean));
  }
  attn::random_numbers numbers(3);
  CHECK(numbers.below(std::numeric_limits<attn::idx_t>::max()) >= 0);
}

}  // namespace
