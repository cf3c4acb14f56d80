// Codes of eight bits: numbers rounded to codes, and products of codes, against plain integers.
#include <attn/core/detail/quantised.hpp>

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <limits>
#include <vector>

#include "support/catch.hpp"
#include "support/random.hpp"

namespace testing::quantised_tests {
namespace {

namespace detail = attn::detail;
using attn::idx_t;
constexpr int w = detail::width<float>;
constexpr idx_t count = 48;  // whole packets of any build

TEST_CASE("Numbers are rounded to the nearest code, in their order", "[quantised]") {
  random_source random(3);
  std::vector<float> x(count);
  float largest = 0;
  for (float& number : x) number = static_cast<float>(random.normal()), largest = std::max(largest, std::abs(number));
  std::vector<detail::code_pair> pairs(count / 2);
  const float factor = detail::round_to_codes(x.data(), count, largest, 1000, pairs.data());
  for (idx_t n = 0; n < count; ++n) {
    const auto& pair = pairs[static_cast<std::size_t>(n / 2)];
    const float code = n % 2 ? pair.second : pair.first;
    // half a code, and the rounding of x / factor, which is at most 1000
    CHECK(std::abs(factor * code - x[static_cast<std::size_t>(n)]) <= factor * (0.5f + 1e-4f));
  }
  CHECK(
      std::isnan(detail::round_to_codes(x.data(), count, std::numeric_limits<float>::infinity(), 1000, pairs.data())));
}

TEST_CASE("Codes are at most the largest one in every rounding mode", "[quantised]") {
  constexpr int modes[] = {FE_TONEAREST, FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
  constexpr idx_t cols = 16;
  random_source random(6);
  const detail::quantised_layout layout{cols, false};
  for (int n = 0; n < 200; ++n) {
    std::vector<float> x(count);
    for (float& number : x) number = static_cast<float>(random.normal());
    const float largest = 6 + std::abs(x[5]);
    for (idx_t i = 0; i < count; i += 3) x[static_cast<std::size_t>(i)] = i % 2 ? largest : -largest;
    std::vector<detail::code_pair> pairs(count / 2);
    std::vector<std::int8_t> block(static_cast<std::size_t>(layout.bytes()));
    const int mode = modes[n % 4];
    std::fesetround(mode);
    detail::round_to_codes(x.data(), count, largest, detail::code_most, pairs.data());
    detail::quantise_row(x.data(), 1, layout, block.data(), 0);
    std::fesetround(FE_TONEAREST);
    CAPTURE(n, mode);
    bool right = true;
    for (idx_t i = 0; i < count; ++i) {
      const auto& pair = pairs[static_cast<std::size_t>(i / 2)];
      const double exact = double(x[static_cast<std::size_t>(i)]) / largest;
      right &= std::abs((i % 2 ? pair.second : pair.first) - exact * detail::code_most) <= 1.1;
      if (i < cols)
        right &= std::abs(block[static_cast<std::size_t>(layout.code(0, i))] - exact * 127) <= 1.1 &&
                 block[static_cast<std::size_t>(layout.code(0, i))] >= -127;
    }
    CHECK(right);
  }
}

TEST_CASE("Both products of each pair of codes are added, exactly", "[quantised]") {
  random_source random(4);
  constexpr int depth = 6;  // pairs
  std::int8_t codes[depth][w][2];
  detail::code_pair factors[depth];
  std::int32_t wanted[w] = {};
  detail::whole_lanes sums{};
  for (int k = 0; k < depth; ++k) {
    const auto code = [&](int most) { return static_cast<int>(random.below(2 * most + 1)) - most; };
    factors[k] = {static_cast<std::int16_t>(code(20000)), static_cast<std::int16_t>(code(20000))};
    for (int lane = 0; lane < w; ++lane) {
      for (auto& c : codes[k][lane]) c = static_cast<std::int8_t>(code(127));
      wanted[lane] += codes[k][lane][0] * factors[k].first + codes[k][lane][1] * factors[k].second;
    }
    sums = detail::add_products(sums, detail::load_code_pairs(&codes[k][0][0]), detail::broadcast_pair(factors[k]));
  }
  float found[w];
  detail::store<float>(found, detail::whole_to_float(sums));
  for (int lane = 0; lane < w; ++lane) CHECK(found[lane] == static_cast<float>(wanted[lane]));
}

// All 256 of them, one by one and by whole vectors, and to the nearest.
template <class F>
void check_float8(float least, float beyond) {
  constexpr std::size_t all = 256;
  std::vector<F> codes(all);
  std::vector<float> numbers(all), loaded(all);
  for (std::size_t n = 0; n < all; ++n) {
    codes[n].bits = static_cast<std::uint8_t>(n);
    numbers[n] = static_cast<float>(codes[n]);
    if (std::isfinite(numbers[n])) CHECK(F(numbers[n]).bits == n);
  }
  for (std::size_t n = 0; n < all; n += w) detail::store<float>(&loaded[n], detail::load_as<float>(&codes[n]));
  for (std::size_t n = 0; n < all; ++n) CHECK((loaded[n] == numbers[n] || !std::isfinite(numbers[n])));
  CHECK(numbers[1] == least);
  CHECK(*std::max_element(numbers.begin(), numbers.begin() + F::largest_bits + 1) == F::largest);
  random_source random(5);
  for (int n = 0; n < 2000; ++n) {
    const float x = std::ldexp(static_cast<float>(random.normal()), static_cast<int>(random.below(24)) - 18);
    float nearest = F::largest;
    for (const float y : numbers)
      if (std::abs(y - x) < std::abs(nearest - x)) nearest = y;
    CHECK(std::abs(static_cast<float>(F(x)) - x) == std::abs(nearest - x));
  }
  CHECK(static_cast<float>(F(-beyond)) == -F::largest);
  CHECK(std::isnan(static_cast<float>(F(std::numeric_limits<float>::quiet_NaN()))));
}
TEST_CASE("Floats of eight bits", "[quantised]") {
  check_float8<attn::float8_e4m3>(0x1p-9f, 1000);
  check_float8<attn::float8_e5m2>(0x1p-16f, std::numeric_limits<float>::infinity());
}

}  // namespace
}  // namespace testing::quantised_tests
