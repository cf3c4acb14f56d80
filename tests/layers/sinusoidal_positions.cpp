// sinusoidal_positions against the formulas of both layouts.
#include "layers/layers.hpp"

#include <attn/layers/sinusoidal_positions.hpp>

namespace testing::sinusoidal_positions_tests {
namespace {

// Written as in the papers' code: by pairs, and as two halves with an increment of the logarithm.
tensor<double> interleaved(idx_t first, idx_t length, idx_t dim, double base) {
  tensor<double> out(1, 1, length, dim);
  for (idx_t t = 0; t < length; ++t)
    for (idx_t pair = 0; 2 * pair < dim; ++pair) {
      const double rate = std::exp(-std::log(base) * (2.0 * static_cast<double>(pair)) / static_cast<double>(dim));
      const double angle = static_cast<double>(first + t) * rate;
      out(0, 0, t, 2 * pair) = std::sin(angle);
      if (2 * pair + 1 < dim) out(0, 0, t, 2 * pair + 1) = std::cos(angle);
    }
  return out;
}
tensor<double> halves(idx_t first, idx_t length, idx_t dim, double base) {
  tensor<double> out(1, 1, length, dim);
  const idx_t scales = dim / 2;
  const double increment = std::log(base) / std::max(1.0, static_cast<double>(scales) - 1);
  for (idx_t t = 0; t < length; ++t)
    for (idx_t i = 0; i < scales; ++i) {
      const double angle = static_cast<double>(first + t) * std::exp(-increment * static_cast<double>(i));
      out(0, 0, t, i) = std::sin(angle);
      out(0, 0, t, scales + i) = std::cos(angle);
    }
  return out;
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("sinusoidal_positions: against the reference", "[sinusoidal_positions]", all_types) {
  using S = TestType;
  for (auto layout : {attn::position_layout::interleaved, attn::position_layout::halves})
    for (idx_t first : {0, 5, 100000, -3})
      for (idx_t length : {0, 1, 9})
        for (idx_t dim : {0, 1, 2, 3, 8, 33, 64}) {
          CAPTURE(int(layout), first, length, dim);
          const double base = dim == 33 ? 500000 : 10000;
          const auto wanted = layout == attn::position_layout::halves ? halves(first, length, dim, base)
                                                                      : interleaved(first, length, dim, base);
          tensor<S> two(2, 1, length, dim, S(1));
          attn::sinusoidal_positions(sequence(two), {.first = first, .layout = layout, .base = base});
          tensor<S> added(2, 1, length, dim, S(1));
          attn::sinusoidal_positions(sequence(added),
                                     {.first = first, .layout = layout, .base = base, .accumulate = true});
          double worst = 0, worst_sum = 0;
          for (idx_t b = 0; b < 2; ++b)
            for (idx_t t = 0; t < length; ++t)
              for (idx_t d = 0; d < dim; ++d) {
                const double value = wanted(0, 0, t, d);
                worst = std::max(worst, std::abs(static_cast<double>(two(b, 0, t, d)) - value));
                worst_sum = std::max(worst_sum, std::abs(static_cast<double>(added(b, 0, t, d)) - (1 + value)));
              }
          constexpr double allowed = std::same_as<S, double> ? 1e-10 : static_cast<double>(tolerance<S>::out);
          CHECK(worst <= allowed);
          CHECK(worst_sum <= 2 * allowed);
        }
}

TEST_CASE("sinusoidal_positions: Eigen matrices, any order of storage, and what is refused", "[sinusoidal_positions]") {
  Eigen::MatrixXf columns(7, 6);
  Eigen::Matrix<float, -1, -1, Eigen::RowMajor> out(7, 6);
  attn::sinusoidal_positions(columns);
  attn::sinusoidal_positions(out);
  CHECK(columns == out);
  CHECK(out.row(0) == Eigen::RowVectorXf{{0, 1, 0, 1, 0, 1}});
  for (double base : {0.0, -1.0, std::numeric_limits<double>::quiet_NaN()}) {
    const std::string message = refusal([&] { attn::sinusoidal_positions(out, {.base = base}); });
    CHECK(message.starts_with("attn::sinusoidal_positions: expected base > 0; found "));
    CHECK(columns == out);
  }
}

}  // namespace testing::sinusoidal_positions_tests
