// The transform beneath: roots of unity, any length, and channels that do not touch each other.
#include <attn/fourier/detail/plan.hpp>

#include <cfloat>

#include "reference/fnet.hpp"
#include "support/call.hpp"
#include "support/catch.hpp"
#include "support/random.hpp"

namespace testing::transform_tests {
namespace {

using attn::detail::arena;
using attn::detail::fourier_plan;
template <class T>
constexpr idx_t wide = attn::detail::row_width<T>;

// A plan with memory of its own, and rows to transform.
template <class T>
struct planned {
  std::vector<std::byte> memory;
  std::vector<T> rows;
  fourier_plan<T> plan;

  explicit planned(idx_t n) {
    arena count;
    plan = fourier_plan<T>::layout(count, n);
    memory.resize(count.used() + 64);
    const auto begin = reinterpret_cast<std::uintptr_t>(memory.data());
    arena pieces(memory.data() + (64 - begin % 64) % 64);
    plan = fourier_plan<T>::layout(pieces, n);
    rows.resize(static_cast<std::size_t>((n + plan.spare_rows()) * wide<T>));
    plan.fill(spare());
  }
  T* spare() { return rows.data() + plan.length() * wide<T>; }
  void hartley_twice() { attn::detail::hartley_twice(plan, rows.data(), spare()); }
  T result(idx_t k, idx_t lane) const { return rows[static_cast<std::size_t>(plan.order(k) * wide<T> + lane)]; }
};

// The error of 2 H_k = 2 Σ_t x_t cas(2π t k / n) over all channels, relative.
template <class T>
double hartley_error(idx_t n) {
  planned<T> p(n);
  const tensor<double> x = random_normal(static_cast<std::uint64_t>(n), 1, 1, n, wide<T>);
  for (std::size_t i = 0; i < x.data.size(); ++i) p.rows[i] = static_cast<T>(x.data[i]);
  const std::vector<T> given(p.rows.begin(), p.rows.begin() + n * wide<T>);
  p.hartley_twice();
  const auto roots = reference::circle(n);
  double wrong = 0, whole = 0;
  for (idx_t k = 0; k < n; ++k)
    for (idx_t lane = 0; lane < wide<T>; ++lane) {
      double sum = 0;
      for (idx_t t = 0; t < n; ++t) {
        const auto root = roots[static_cast<std::size_t>(t * k % n)];
        sum +=
            2 * static_cast<double>(given[static_cast<std::size_t>(t * wide<T> + lane)]) * (root.real() - root.imag());
      }
      const double found = static_cast<double>(p.result(k, lane));
      wrong += (found - sum) * (found - sum);
      whole += sum * sum;
    }
  return std::sqrt(wrong / whole);
}

}  // namespace

TEST_CASE("roots of unity are those of long double", "[transform]") {
  for (idx_t n : {1, 2, 3, 7, 8, 12, 360, 4096, 4099, 262144}) {
    double worst = 0;
    for (idx_t k = 0; k < std::min<idx_t>(n, 5000); ++k) {
      const long double angle = 2 * std::numbers::pi_v<long double> * static_cast<long double>(k) / n;
      const auto root = attn::detail::root_of_unity(k, n);
      worst = std::max({worst, std::abs(root.real() - static_cast<double>(std::cos(angle))),
                        std::abs(root.imag() + static_cast<double>(std::sin(angle)))});
    }
    CHECK(worst <= 2 * DBL_EPSILON);
  }
  CHECK(attn::detail::root_of_unity(3, 4) == std::complex<double>(0, 1));
  CHECK(attn::detail::root_of_unity(5, 10).imag() == 0);
}

TEST_CASE("lengths of the convolution are products of 2, 3 and 5", "[transform]") {
  for (idx_t n : {1, 2, 7, 11, 997, 8197, 131073}) {
    const idx_t size = attn::detail::smooth_size(n);
    CHECK(size >= n);
    CHECK(size < 2 * n);
    idx_t rest = size;
    for (idx_t p : {2, 3, 5})
      for (; rest % p == 0;) rest /= p;
    CHECK(rest == 1);
  }
}

// A transform's own error grows with the logarithm of its length and stays below 3e-7 in float; in double that of the
// plain sum it is compared with, which grows with the square root, is what shows.
TEMPLATE_LIST_TEST_CASE("the transform of every length", "[transform]", exact_types) {
  constexpr double bound = std::is_same_v<TestType, float> ? 5e-7 : 4e-15;
  std::vector<idx_t> lengths;
  for (idx_t n = 1; n <= 130; ++n) lengths.push_back(n);
  for (idx_t n : {243, 256, 257, 360, 512, 625, 729, 899, 961, 997, 1000, 1024, 1147}) lengths.push_back(n);
  for (idx_t n : lengths) {
    INFO("length " << n);
    CHECK(hartley_error<TestType>(n) <= bound);
  }
}

TEMPLATE_LIST_TEST_CASE("the transform: a channel's bits do not depend on other lanes", "[transform]", exact_types) {
  using T = TestType;
  for (idx_t n : {8, 60, 77, 128, 1000, 37}) {
    INFO("length " << n);
    planned<T> all(n), lone(n);
    random_source random(3);
    for (idx_t t = 0; t < n; ++t)
      for (idx_t lane = 0; lane < wide<T>; ++lane) {
        const auto at = static_cast<std::size_t>(t * wide<T> + lane);
        all.rows[at] = static_cast<T>(random.normal());
        if (lane % (wide<T> / 2) == 0) lone.rows[at] = all.rows[at];  // the real and the imaginary channel of lane 0
      }
    all.hartley_twice();
    lone.hartley_twice();
    bool same = true;
    for (idx_t k = 0; k < n; ++k)
      for (idx_t lane : {idx_t(0), wide<T> / 2}) same = same && all.result(k, lane) == lone.result(k, lane);
    CHECK(same);
  }
}

}  // namespace testing::transform_tests
