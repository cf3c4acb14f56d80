// Law 9. Extremes: logits of ±1e4, rows that see no key and large values never give NaN, never overflow.
#include "laws/law.hpp"
#include "laws/operators/mask.hpp"
#include "support/catch.hpp"

namespace testing::extremes_tests {
TEMPLATE_LIST_TEST_CASE("law 9: logits of ±1e4 stay finite", "[extremes]", exact_types) {
  for (const auto& op : operators<TestType>())
    for (law_shape shape : law_shapes()) {
      if (!op.bounded) continue;
      shape = fitted(op, shape);
      INFO(op.name << ", " << text(shape));
      const law_inputs<TestType> in = extreme_inputs<TestType>(shape);
      const law_result<TestType> r = attend(op, shape, in);
      CHECK(all_finite(r.out));
      if (op.lse) CHECK(all_finite(r.lse));
      if (!op.averages || !op.positive) continue;
      TestType largest = 0, result = 0;  // a weighted mean lies between its values
      for (TestType x : in.v.data) largest = std::max(largest, std::abs(x));
      for (TestType x : r.out.data) result = std::max(result, std::abs(x));
      CHECK(result <= largest * (1 + 300 * std::numeric_limits<TestType>::epsilon()));
    }
}

// lse is the logarithm of the denominator: the sink where there is one.
TEMPLATE_LIST_TEST_CASE("law 9: rows that see no key are zero, lse −infinity or the sink", "[extremes]", exact_types) {
  for (const auto& op : operators<TestType>()) {
    if (!op.cross || !op.sees) continue;
    for (auto [queries, keys] : {std::pair<idx_t, idx_t>{9, 0}, {70, 3}, {130, 60}, {257, 256}}) {
      const law_shape shape = fitted(op, {.queries = queries, .keys = keys});
      INFO(op.name << ", " << text(shape));
      const law_result<TestType> r = attend(op, shape, random_inputs<TestType>(shape));
      bool right = true;
      for (idx_t b = 0; b < shape.batch; ++b)
        for (idx_t h = 0; h < shape.heads; ++h)
          for (idx_t i = 0; i < queries; ++i) {
            bool any = false;
            for (idx_t j = 0; j < keys; ++j) any = any || op.sees(shape, b, h, i, j);
            for (idx_t d = 0; d < shape.value_dim; ++d)
              right = right && (any ? std::isfinite(r.out(b, h, i, d)) : r.out(b, h, i, d) == 0);
            if (!op.lse) continue;
            const TestType lse = r.lse(b, h, i, 0);
            const bool none = lse == -std::numeric_limits<TestType>::infinity(), of_sinks = !op.averages && !none;
            const TestType sink = law_sinks<TestType>(shape)[static_cast<std::size_t>(h)];
            right = right && (any ? std::isfinite(lse) : of_sinks ? std::abs(lse - sink) <= TestType(1e-6) : none);
          }
      CHECK(right);
    }
  }
}

// Sums of values precede the division by the sum of the weights, none of which exceeds 1.
TEMPLATE_LIST_TEST_CASE("law 9: values up to the largest number over the keys do not overflow", "[extremes]",
                        exact_types) {
  using T = TestType;
  int checked = 0;
  for (const auto& op : operators<T>()) {
    if (!op.lse || !op.averages || !op.positive) continue;
    for (law_shape shape : law_shapes({1, 7, 65, 257})) {
      shape = fitted(op, shape);
      INFO(op.name << ", " << text(shape));
      law_inputs<T> in = random_inputs<T>(shape);
      // lsh sees a key in every round, long_short compressed keys too.
      const idx_t weights = op.of == "lsh" ? 4 * shape.keys : shape.keys + (op.of == "long_short" ? 32 : 0);
      const T largest = T(0.99) * std::numeric_limits<T>::max() / static_cast<T>(weights);
      std::fill(in.v.data.begin(), in.v.data.end(), largest);
      T result = 0;
      for (T x : attend(op, shape, in).out.data) result = std::isnan(x) ? x : std::max(result, std::abs(x));
      CHECK(result <= largest * (1 + 300 * std::numeric_limits<T>::epsilon()));
      ++checked;
    }
  }
  CHECK(checked > 0);
}

}  // namespace testing::extremes_tests
