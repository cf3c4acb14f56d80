// Law 7. Averages: operators whose weights sum to 1 map constant values to that constant.
#include "laws/law.hpp"
#include "support/catch.hpp"

namespace testing::averages_tests {

TEMPLATE_LIST_TEST_CASE("law 7: the average of a constant is that constant", "[averages]", exact_types) {
  for (const auto& op : operators<TestType>()) {
    if (!op.averages) continue;
    for (law_shape shape : law_shapes()) {
      shape = fitted(op, shape);
      INFO(op.name << ", " << text(shape));
      law_inputs<TestType> in = random_inputs<TestType>(shape);
      const auto constant = [](idx_t d) { return TestType(d % 2 ? -3 : 2) + TestType(d) / 8; };
      for (idx_t b = 0; b < shape.batch; ++b)
        for (idx_t h = 0; h < shape.kv_heads; ++h)
          for (idx_t j = 0; j < shape.keys; ++j)
            for (idx_t d = 0; d < shape.value_dim; ++d) in.v(b, h, j, d) = constant(d);
      const law_result<TestType> r = attend(op, shape, in);
      double worst = 0;
      for (idx_t b = 0; b < shape.batch; ++b)
        for (idx_t h = 0; h < shape.heads; ++h)
          for (idx_t i = 0; i < shape.queries; ++i)
            for (idx_t d = 0; d < shape.value_dim; ++d) {
              const double error = std::abs(static_cast<double>(r.out(b, h, i, d) / constant(d)) - 1);
              if (!(error <= worst)) worst = error;
            }
      // Numerator and denominator are sums of the same weights, or of the same features over keys and then dim, rounded
      // differently: at worst half an ulp a term each.
      CHECK(worst <= op.error_factor * static_cast<double>(shape.keys + shape.dim + 4) *
                         std::numeric_limits<TestType>::epsilon());
    }
  }
}

}  // namespace testing::averages_tests
