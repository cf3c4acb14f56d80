// Sine and cosine are as near as promised, and every lane is its own affair.
#include <attn/core/detail/sin_cos.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "support/catch.hpp"
#include "support/random.hpp"

namespace testing::sin_cos_tests {
namespace {

template <class T>
struct lanes {
  static constexpr int count = attn::detail::width<T>;
  T sine[count], cosine[count];

  explicit lanes(const T* x) {
    attn::detail::packet<T> s, c;
    attn::detail::sin_cos<T>(attn::detail::load<T>(x), s, c);
    attn::detail::store<T>(sine, s), attn::detail::store<T>(cosine, c);
  }
};

template <class T>
bool same_bits_of(T a, T b) {
  return std::memcmp(&a, &b, sizeof a) == 0;
}

}  // namespace

TEMPLATE_TEST_CASE("sine and cosine are as near as promised", "[sin_cos]", float, double) {
  constexpr int count = lanes<TestType>::count;
  random_source random(3);
  long double worst = 0;
  for (int n = 0; n < 20000; ++n) {
    TestType x[count];
    for (TestType& number : x)
      number = static_cast<TestType>((2 * random.uniform() - 1) * (n % 2 ? 8192 : std::ldexp(1.0, n % 13)));
    const lanes<TestType> y(x);
    for (int i = 0; i < count; ++i) {
      worst = std::max(worst, std::abs(y.sine[i] - std::sin(static_cast<long double>(x[i]))));
      worst = std::max(worst, std::abs(y.cosine[i] - std::cos(static_cast<long double>(x[i]))));
    }
  }
  CHECK(worst <= (attn::detail::fuses_products ? 1 : 1.1L) * std::numeric_limits<TestType>::epsilon());
}

// Far, infinite, or none at all: what one lane holds changes no bit of another, and a NaN hides no far lane.
TEMPLATE_TEST_CASE("a lane depends on no other", "[sin_cos]", float, double) {
  constexpr int count = lanes<TestType>::count;
  const TestType inf = std::numeric_limits<TestType>::infinity(), nan = std::numeric_limits<TestType>::quiet_NaN();
  const TestType special[] = {TestType(1e5), TestType(-1e30), inf, nan};
  random_source random(4);
  for (int n = 0; n < 200; ++n) {
    TestType x[count];
    for (TestType& number : x) number = static_cast<TestType>(20 * random.normal());
    const lanes<TestType> before(x);
    bool same = true, right = true;
    for (int i = 0; i < count; ++i)
      for (TestType number : special)
        for (TestType beside : special) {
          TestType changed[count];
          std::copy_n(x, count, changed);
          changed[i] = number;
          changed[(i + n) % count] = beside;
          const lanes<TestType> after(changed);
          for (int j = 0; j < count; ++j) {
            if (changed[j] == x[j])
              same = same && same_bits_of(after.sine[j], before.sine[j]) &&
                     same_bits_of(after.cosine[j], before.cosine[j]);
            else if (std::isfinite(changed[j]))
              right = right && after.sine[j] == std::sin(changed[j]) && after.cosine[j] == std::cos(changed[j]);
            else
              right = right && std::isnan(after.sine[j]) && std::isnan(after.cosine[j]);
          }
        }
    CHECK(same);
    CHECK(right);
  }
}

}  // namespace testing::sin_cos_tests
