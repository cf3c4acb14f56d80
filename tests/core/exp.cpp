// The exponential is within 2 ulp of the true value, at every width and at the edges.
#include <attn/core/detail/exp.hpp>

#include <array>
#include <bit>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "support/catch.hpp"
#include "support/random.hpp"

namespace testing::exp_tests {
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
  attn::exp(x.data(), y.data(), static_cast<attn::idx_t>(x.size()));
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
  attn::exp(x.data(), whole.data(), static_cast<attn::idx_t>(x.size()));
  for (std::size_t begin = 0; begin < 9; ++begin)
    for (std::size_t count = 0; count + begin <= x.size(); ++count) {
      std::vector<TestType> part(x.begin() + static_cast<std::ptrdiff_t>(begin), x.end());
      attn::exp(part.data(), part.data(), static_cast<attn::idx_t>(count));
      bool same = true;
      for (std::size_t n = 0; n < part.size(); ++n)
        same = same && part[n] == (n < count ? whole[begin + n] : x[begin + n]);
      CHECK(same);
    }
}

TEMPLATE_TEST_CASE("split_exp is within 2 ulp for any size, and its exponent is whole", "[exp]", float, double) {
  using namespace attn::detail;
  random_source random(6);
  double worst = 0;
  bool whole = true, near_one = true;
  for (int n = 0; n < 20000; ++n) {
    constexpr int digits = std::numeric_limits<TestType>::digits;
    const auto x = static_cast<TestType>(std::ldexp(random.normal(), static_cast<int>(random.below(digits + 15)) - 12));
    const auto e = split_exp<TestType>(broadcast<TestType>(x));
    TestType factor[width<TestType>], exponent[width<TestType>];
    store<TestType>(factor, e.factor), store<TestType>(exponent, e.exponent);
    const long double exact = std::exp(static_cast<long double>(x) -
                                       static_cast<long double>(exponent[0]) * 0.693147180559945309417232121458176568L);
    const double rounded = fuses_products ? 1 : 2;  // times: where products are rounded apart
    const double allowed = rounded * (std::abs(x) < 2048 ? 2 : static_cast<double>(2 + std::abs(x) / 2));
    if (std::abs(x) < std::ldexp(1.0, digits - 1))  // beyond, the nearest exponent may be no number
      worst = std::max(worst, ulps(factor[0], exact) / allowed);
    whole = whole && exponent[0] == std::round(exponent[0]);
    const bool exact_whole = std::abs(x) < 2048;  // beyond, the nearest whole number is off by more and more
    near_one = near_one && factor[0] > TestType(exact_whole ? 0.7 : 0.47) &&
               factor[0] < TestType(exact_whole ? 1.42 : 2.12);
  }
  CHECK(worst <= 1);
  CHECK(whole);
  CHECK(near_one);
}

TEMPLATE_TEST_CASE("split_exp of what is no weight", "[exp]", float, double) {
  using namespace attn::detail;
  constexpr TestType infinity = std::numeric_limits<TestType>::infinity();
  const auto split = [](TestType x) {
    const auto e = split_exp<TestType>(broadcast<TestType>(x));
    return std::array{sum_lanes(e.factor) / width<TestType>, sum_lanes(e.exponent) / width<TestType>};
  };
  CHECK(split(-infinity) == std::array{TestType(0), -infinity});
  CHECK(std::isnan(split(infinity)[0]));
  CHECK(split(infinity)[1] == -infinity);
  CHECK(std::isnan(split(std::numeric_limits<TestType>::quiet_NaN())[0]));
  CHECK(split(std::numeric_limits<TestType>::quiet_NaN())[1] == -infinity);
  CHECK(split(0) == std::array{TestType(1), TestType(0)});
  for (TestType huge : {std::numeric_limits<TestType>::max(), std::numeric_limits<TestType>::lowest()}) {
    TestType lanes[width<TestType>];
    store<TestType>(lanes, split_exp<TestType>(broadcast<TestType>(huge)).exponent);
    CHECK((std::isfinite(split(huge)[0]) && std::isfinite(lanes[0]) && (lanes[0] > 0) == (huge > 0)));
  }
}

TEMPLATE_TEST_CASE("power_of_two is exact, and 0 below", "[exp]", float, double) {
  using namespace attn::detail;
  constexpr int bias = float_bits<TestType>::bias;
  const auto power = [](TestType n) {
    TestType lanes[width<TestType>];
    store<TestType>(lanes, power_of_two<TestType>(broadcast<TestType>(n)));
    return lanes[0];
  };
  for (int n : {0, 1, -1, -20, bias, 1 - bias}) CHECK(power(TestType(n)) == std::ldexp(TestType(1), n));
  for (TestType n : {TestType(-bias), TestType(-bias - 1), TestType(-1e30), -std::numeric_limits<TestType>::infinity()})
    CHECK(power(n) == 0);
}

TEMPLATE_TEST_CASE("sigmoid is right on both sides and never overflows", "[exp]", float, double) {
  using namespace attn::detail;
  const auto sigmoid = [](TestType x) {
    const sigmoid_fraction<TestType> s(broadcast<TestType>(x));
    TestType lanes[width<TestType>];
    store<TestType>(lanes, div(s.over, s.under));
    return lanes[0];
  };
  random_source random(7);
  double worst = 0;
  for (int n = 0; n < 20000; ++n) {
    const auto x = static_cast<TestType>(80 * (2 * random.uniform() - 1));
    worst = std::max(worst, ulps(sigmoid(x), 1 / (1 + std::exp(-static_cast<long double>(x)))));
  }
  CHECK(worst <= 4);
  CHECK(sigmoid(0) == TestType(0.5));
  for (TestType huge :
       {TestType(1e4), std::numeric_limits<TestType>::max(), std::numeric_limits<TestType>::infinity()}) {
    CHECK(sigmoid(huge) == 1);
    CHECK(sigmoid(-huge) == 0);
  }
  CHECK(std::isnan(sigmoid(std::numeric_limits<TestType>::quiet_NaN())));
}

#if defined(FE_UPWARD) && defined(FE_DOWNWARD) && defined(FE_TOWARDZERO)
// The whole number next to x log2 e is then off by up to 1, where the polynomial, fitted to 1/2, is off by x^7 / 5040
// in float and x^12 / 12! in double, at ln 2.
TEMPLATE_TEST_CASE("exp in other rounding modes", "[exp]", float, double) {
  const double allowed = std::is_same_v<TestType, float> ? 2.5e-5 : 5e-11;
  std::vector<TestType> x;
  for (int n = -3000; n <= 3000; ++n) x.push_back(static_cast<TestType>(n) * lowest<TestType> / 3001);
  for (TestType more : {-0.7f, 0.7f}) x.push_back(more);
  std::vector<TestType> y = x;
  for (int mode : {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO}) {
    std::fesetround(mode);
    attn::exp(x.data(), y.data(), std::ssize(x));
    std::fesetround(FE_TONEAREST);
    double worst = 0;
    for (std::size_t n = 0; n < x.size(); ++n) {
      const double right = std::exp(static_cast<double>(x[n])), error = std::abs(static_cast<double>(y[n]) / right - 1);
      if (!(error <= worst)) worst = error;
    }
    CAPTURE(mode);
    CHECK(worst <= allowed);
  }
}
#endif

}  // namespace testing::exp_tests
