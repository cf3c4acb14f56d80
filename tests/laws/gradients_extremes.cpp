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

// Where all scores of a row are equal, weights do not depend on how large they are: neither does the gradient of v, if
// lse is computed anew (given as one number, it has lost the digits that tell weights apart).
TEMPLATE_LIST_TEST_CASE("law 9 of gradients: equal scores of 1e8 weigh as small ones do", "[gradient_extremes]",
                        exact_types) {
  using T = TestType;
  int compared = 0;
  for (const auto& op : operators<T>()) {
    if (!op.backward || !op.lse || !op.averages || op.tied || !op.reads_values || op.name != op.of) continue;
    if (op.of == "long_short" || op.of == "multipole") continue;  // attend means of keys too, whose scores are rounded
    const law_shape shape = fitted(op, {.queries = 50, .keys = 50, .dim = 64});
    INFO(op.name << ", " << text(shape));
    const tensor<T> d_out = random_d_out<T>(shape);
    const auto gradient_of_v = [&](double score) {
      law_inputs<T> in = random_inputs<T>(shape);
      for (T& x : in.q.data) x = 1;
      for (T& x : in.k.data) x = static_cast<T>(score / std::sqrt(static_cast<double>(shape.dim)));
      law_result<T> forward = attend(op, shape, in);
      forward.lse = {};
      attn::execution serial;
      return differentiate(op, shape, in, forward, d_out, serial).v;
    };
    const tensor<double> small = cast<double>(gradient_of_v(1e-2));
    for (double score : {1e4, 1e6, 1e8}) {
      CAPTURE(score);
      CHECK(relative_error(gradient_of_v(score), small) <= 100 * std::numeric_limits<T>::epsilon());
    }
    ++compared;
  }
  CHECK(compared >= 6);
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
