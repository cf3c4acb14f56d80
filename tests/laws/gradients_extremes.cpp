// Law 9 of gradients. Extremes: logits of ±1e4 and rows that see no key never give NaN, never overflow.
#include "laws/gradient_law.hpp"
#include "support/catch.hpp"

namespace testing::gradients_extremes_tests {
TEMPLATE_LIST_TEST_CASE("law 9 of gradients: logits of ±1e4 stay finite", "[gradient_extremes]", exact_types) {
  for (const auto& op : operators<TestType>()) {
    if (!op.backward || !op.bounded) continue;
    for (law_shape shape : law_shapes({1, 2, 7, 65, 130, 257})) {
      shape = fitted(op, shape);
      INFO(op.name << ", " << text(shape));
      CHECK(all_finite(differentiate(op, shape, extreme_inputs<TestType>(shape), random_d_out<TestType>(shape))));
    }
  }
}

TEMPLATE_LIST_TEST_CASE("law 9 of gradients: rows that see no key have none", "[gradient_extremes]", exact_types) {
  using T = TestType;
  for (const auto& op : operators<T>()) {
    if (!op.backward || !op.cross || !op.sees) continue;
    for (auto [queries, keys] : {std::pair<idx_t, idx_t>{9, 0}, {70, 3}, {130, 60}, {257, 256}}) {
      const law_shape shape = fitted(op, {.queries = queries, .keys = keys});
      INFO(op.name << ", " << text(shape));
      const law_inputs<T> in = random_inputs<T>(shape);
      const law_gradients<T> g = differentiate(op, shape, in, random_d_out<T>(shape));
      CHECK(all_finite(g));
      bool right = true;
      for (idx_t b = 0; b < shape.batch; ++b)
        for (idx_t h = 0; h < shape.heads; ++h)
          for (idx_t i = 0; i < queries; ++i) {
            bool any = false;
            for (idx_t j = 0; j < keys; ++j) any = any || op.sees(shape, b, h, i, j);
            for (idx_t d = 0; !any && d < shape.dim; ++d) right = right && g.q(b, h, i, d) == 0;
          }
      CHECK(right);
    }
  }
}

}  // namespace testing::gradients_extremes_tests
