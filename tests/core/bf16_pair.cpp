// Products of bf16 numbers summed in float: conversion, packing and the register-blocked product, on numbers whose
// products and sums are exact, so that every make must give the same bits. The address build tests the model.
#include <attn/core/detail/exp.hpp>
#include <attn/core/detail/tile_product.hpp>

#include <cmath>
#include <vector>

#include "support/catch.hpp"
#include "support/measure.hpp"

namespace testing::bf16_pair_tests {
namespace {

namespace detail = attn::detail;
using attn::idx_t;
using detail::bf16_pair;
using detail::packet;
using detail::width;
using Eigen::bfloat16;
using Eigen::half;

// On any machine; products are tested where the build has them.
std::vector<float> converted(const std::vector<float>& x) {
  std::vector<float> result;
  for (std::size_t at = 0; at < x.size(); at += width<float>) {
    float lanes[width<float>] = {};
    std::copy_n(x.data() + at, std::min(x.size() - at, std::size_t(width<float>)), lanes);
    const detail::half_lanes narrow = detail::to_bf16(detail::load<float>(lanes));
    bfloat16 out[width<float>];
    std::memcpy(static_cast<void*>(out), &narrow, sizeof narrow);
    for (bfloat16 y : out) result.push_back(static_cast<float>(y));
  }
  result.resize(x.size());
  return result;
}

TEST_CASE("to_bf16 rounds to the nearest, of two the even one", "[bf16]") {
  const float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> x = {0.0f,        -0.0f,       1.0f,        -1.5f,     0x1.01p0f,  0x1.03p0f, 0x1.010002p0f,
                          0x1.00fffep0f, 0x1.fep127f, 0x1.fffffep127f, infinity, -infinity,  3.14159f,  -2.71828f};
  for (int n = -100; n < 100; ++n) x.push_back(std::ldexp(1.0f + static_cast<float>(n + 100) / 321.0f, n));
  const std::vector<float> y = converted(x);
  for (std::size_t n = 0; n < x.size(); ++n) {
    CAPTURE(x[n]);
    CHECK(y[n] == static_cast<float>(bfloat16(x[n])));
  }
  CHECK(std::signbit(y[1]));
  CHECK(std::isnan(converted({nan})[0]));
  CHECK(std::isnan(converted({-nan})[0]));
}

TEST_CASE("exp2_rounded is within 1.02e-4, exact at 0 and for -infinity", "[bf16]") {
  double worst = 0;
  for (int n = 0; n <= 200000; n += width<float>) {
    float x[width<float>], y[width<float>];
    for (int lane = 0; lane < width<float>; ++lane) x[lane] = -static_cast<float>(n + lane) / 2000;
    detail::store<float>(y, detail::exp2_rounded(detail::load<float>(x)));
    for (int lane = 0; lane < width<float>; ++lane)
      worst = std::max(worst, std::abs(static_cast<double>(y[lane]) / std::exp2(static_cast<double>(x[lane])) - 1));
  }
  CHECK(worst < 1.02e-4);
  float y[width<float>];
  detail::store<float>(y, detail::exp2_rounded(detail::zero<float>()));
  CHECK(y[0] == 1.0f);
  detail::store<float>(y, detail::exp2_rounded(detail::broadcast(-std::numeric_limits<float>::infinity())));
  CHECK(y[0] == 0.0f);
  detail::store<float>(y, detail::exp2_rounded(detail::broadcast(std::numeric_limits<float>::quiet_NaN())));
  CHECK(std::isnan(y[0]));
}

// Small whole numbers: their products and sums are exact.
[[maybe_unused]] float number(idx_t row, idx_t col) {
  return static_cast<float>((row * 7 + col * 13 + row * col) % 15 - 7);
}

// A matrix of numbers as S, `stride` apart in a row.
template <class S>
struct matrix {
  idx_t rows, cols, stride;
  std::vector<S> data;

  matrix(idx_t r, idx_t c, idx_t s, idx_t first_row)
      : rows(r), cols(c), stride(s), data(static_cast<std::size_t>(r * c * s), S(100)) {
    for (idx_t i = 0; i < r; ++i)
      for (idx_t j = 0; j < c; ++j) data[static_cast<std::size_t>((i * c + j) * s)] = S(number(first_row + i, j));
  }
  const S* row(idx_t i) const { return data.data() + i * cols * stride; }
};

// C = A B^T by pack_rows and pack_panels_across, or A B by pack_rows and pack_panels, with the panels' padding NaN
// before; every element of C.
template <class S>
void check_products(idx_t rows, idx_t depth, idx_t cols, idx_t stride) {
  CAPTURE(rows, depth, cols, stride);
  using detail::operands;
  constexpr idx_t wide = detail::panel_width<float>;
  const matrix<S> a(rows, depth, stride, 3), across(cols, depth, stride, 40), straight(depth, cols, stride, 80);
  const bf16_pair rubbish{0x7fc07fc0};
  const idx_t pairs = operands<bf16_pair>(depth);
  std::vector<bf16_pair> tile(
      static_cast<std::size_t>(detail::tile_rows * detail::row_operands<bf16_pair>(depth) + width<float>), rubbish),
      panels(static_cast<std::size_t>(detail::round_up(cols, wide) * (pairs + 1)), rubbish), other = panels;
  detail::pack_rows<bf16_pair>([&](idx_t i) { return a.row(i); }, rows, depth, stride, 1.0f, tile.data());
  detail::pack_panels_across<bf16_pair>([&](idx_t i) { return across.row(i); }, cols, depth, stride, panels.data());
  CHECK(detail::pack_panels<bf16_pair>([&](idx_t i) { return straight.row(i); }, 0, depth, cols, stride, other.data(),
                                       2 * (pairs + 1)));
  const auto check = [&](const bf16_pair* panel, idx_t first, bool transposed) {
    detail::with_tile_height(rows, [&](auto M) {
      detail::tile_product<bf16_pair, M.value, 2>(
          detail::packed_rows<bf16_pair>{tile.data()}, panel, pairs, [&](auto m, auto half, const auto& sums) {
            float lanes[width<float>];
            detail::store<float>(lanes, sums);
            for (idx_t lane = 0; lane < width<float>; ++lane) {
              const idx_t col = first + half * width<float> + lane;
              if (m >= rows || col >= cols) continue;
              float wanted = 0;
              for (idx_t k = 0; k < depth; ++k)
                wanted += number(3 + m, k) * (transposed ? number(40 + col, k) : number(80 + k, col));
              if (lanes[lane] != wanted) FAIL_CHECK("row " << m << ", column " << col << ": " << lanes[lane]);
            }
          });
    });
  };
  for (idx_t col = 0; col < cols; col += wide) {
    check(panels.data() + col * pairs, col, true);
    check(other.data() + col * (pairs + 1), col, false);
  }
}

TEMPLATE_TEST_CASE("Products of pairs, any shape and memory", "[bf16]", bfloat16, half, float) {
  if constexpr (detail::bf16_products != detail::bf16_make::none) {
    for (idx_t rows : {1, 2, 5, int(detail::tile_rows)})
      for (idx_t depth : {1, 2, 3, 16, 31, 32, 33, 64, 77})
        for (idx_t cols : {1, 7, 16, 31, 33, 70})
          for (idx_t stride : {1, 3}) check_products<TestType>(rows, depth, cols, stride);
  }
}

// Threads pack what follows at the same time.
template <class P, class S>
void check_end_of_rows() {
  constexpr unsigned char untouched = 0x5a;
  constexpr std::size_t more = 64;
  for (idx_t rows : {1, 5, int(detail::tile_rows)})
    for (idx_t depth : {1, 2, 3, 7, 16, 31, 32, 33, 64, 77})
      for (idx_t stride : {1, 3}) {
        CAPTURE(rows, depth, stride);
        const std::vector<S> x(static_cast<std::size_t>(rows * depth * stride), S(1));
        const auto size = static_cast<std::size_t>(detail::tile_rows * detail::row_operands<P>(depth));
        std::vector<P> packed(size + more);
        std::memset(static_cast<void*>(packed.data()), untouched, packed.size() * sizeof(P));
        detail::pack_rows<P>([&](idx_t i) { return x.data() + i * depth * stride; }, rows, depth, stride, 1,
                             packed.data());
        const auto* const bytes = reinterpret_cast<const unsigned char*>(packed.data());
        CHECK(std::all_of(bytes + size * sizeof(P), bytes + packed.size() * sizeof(P),
                          [](unsigned char byte) { return byte == untouched; }));
        CHECK(bytes[size * sizeof(P) - 1] != untouched);
      }
}

TEST_CASE("Packed rows end where they say", "[bf16]") {
  check_end_of_rows<float, float>();
  check_end_of_rows<float, half>();
  check_end_of_rows<double, double>();
  if constexpr (detail::bf16_products != detail::bf16_make::none) check_end_of_rows<bf16_pair, bfloat16>();
}

TEST_CASE("Which products of pairs these tests are of", "[bf16]") {
  const char* const makes[] = {"none: bf16 elements are multiplied as float", "avx512", "neon", "the model"};
  const char* unit = "";
#if ATTN_HAS_AMX
  unit = detail::prepare_matrix_unit() ? ", and the matrix unit" : "; the matrix unit is not there or not allowed";
#endif
  WARN("products of bf16 numbers: " << makes[static_cast<int>(detail::bf16_products)] << unit);
}

TEST_CASE("pack_panels of pairs finds what is not finite, also in an odd last row", "[bf16]") {
  if constexpr (detail::bf16_products != detail::bf16_make::none) {
    for (idx_t bad = -1; bad < 5; ++bad) {
      matrix<bfloat16> x(5, 40, 1, 0);
      if (bad >= 0) x.data[static_cast<std::size_t>(bad * 40 + 37)] = std::numeric_limits<bfloat16>::quiet_NaN();
      std::vector<bf16_pair> panels(static_cast<std::size_t>(3 * detail::round_up(40, detail::panel_width<float>)));
      CHECK(detail::pack_panels<bf16_pair>([&](idx_t i) { return x.row(i); }, 0, 5, 40, 1, panels.data(), 6) ==
            (bad < 0));
    }
  }
}

}  // namespace
}  // namespace testing::bf16_pair_tests
