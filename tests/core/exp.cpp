// The exponential is within 2 ulp of the true value, at every width and at the edges.
#include <attn/core/exp.hpp>

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "support/catch.hpp"
#include "support/random.hpp"

namespace testing {
namespace {

// Distance from the exact value in units of the last place of T at that value.
template <class T>
double ulps(T actual, long double exact) {
  const int exponent = std::ilogb(exact) - (std::numeric_limits<T>::digits - 1);
  return static_cast<double>(std::abs((static_cast<long double>(actual) - exact) / std::ldexp(1.0L, exponent)));
}

// Exponents between which e^x is a normal number.
template <class T>
constexpr T lowest = std::is_same_v<T, float> ? T(-87.33654) : T(-708.3964185322641);
template <class T>
constexpr T highest = std::is_same_v<T, float> ? T(88.72283) : T(709.782712893384);

template <class T>
double worst_ulps(const std::vector<T>& x) {
  std::vector<T> y(x.size());
  attn::exp(x.data(), y.data(), static_cast<attn::index>(x.size()));
  double worst = 0;
  for (std::size_t n = 0; n < x.size(); ++n) {
    const double error = ulps(y[n], std::exp(static_cast<long double>(x[n])));
    if (!(error <= worst)) worst = error;
  }
  return worst;
}

}  // namespace

TEMPLATE_TEST_CASE("exp is within 2 ulp over its whole range", "[exp]", float, double) {
  constexpr int count = 1 << 18;
  std::vector<TestType> x(count);
  for (int n = 0; n < count; ++n)
    x[n] = lowest<TestType> + (highest<TestType> - lowest<TestType>)*TestType(n) / TestType(count - 1);
  CHECK(worst_ulps(x) <= 2);
}

TEMPLATE_TEST_CASE("exp is within 2 ulp near 0 and where softmax weights live", "[exp]", float, double) {
  random_source random(5);
  std::vector<TestType> x;
  for (int n = 0; n < 100000; ++n) {
    x.push_back(static_cast<TestType>(-20 * random.uniform()));
    x.push_back(static_cast<TestType>(random.uniform() - 0.5));
    x.push_back(static_cast<TestType>(std::ldexp(random.normal(), static_cast<int>(-random.below(60)))));
  }
  CHECK(worst_ulps(x) <= 2);
}

TEMPLATE_TEST_CASE("exp is exact where the value is known", "[exp]", float, double) {
  using limits = std::numeric_limits<TestType>;
  const TestType inf = limits::infinity();
  const auto exp = [](TestType x) {
    TestType y = 7;
    attn::exp(&x, &y, 1);
    return y;
  };
  CHECK(std::bit_cast<std::array<char, sizeof(TestType)>>(exp(-inf)) == std::array<char, sizeof(TestType)>{});
  CHECK(exp(0) == 1);
  CHECK(exp(TestType(-0.0)) == 1);
  CHECK(exp(inf) == inf);
  CHECK(exp(limits::max()) == inf);
  CHECK(exp(limits::lowest()) == 0);
  CHECK(exp(TestType(-1e4)) == 0);
  CHECK(std::isnan(exp(limits::quiet_NaN())));
}

TEMPLATE_TEST_CASE("exp of an array does not depend on its length or place, and works in place", "[exp]", float,
                   double) {
  const std::vector<double> numbers = random_values(3, 70, 3);
  const std::vector<TestType> x(numbers.begin(), numbers.end());
  std::vector<TestType> whole(x.size());
  attn::exp(x.data(), whole.data(), static_cast<attn::index>(x.size()));
  for (std::size_t begin = 0; begin < 9; ++begin)
    for (std::size_t count = 0; count + begin <= x.size(); ++count) {
      std::vector<TestType> part(x.begin() + static_cast<std::ptrdiff_t>(begin), x.end());
      attn::exp(part.data(), part.data(), static_cast<attn::index>(count));
      bool same = true;
      for (std::size_t n = 0; n < part.size(); ++n)
        same = same && part[n] == (n < count ? whole[begin + n] : x[begin + n]);
      CHECK(same);
    }
}

}  // namespace testing
