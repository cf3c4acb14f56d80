// Law 8. Limits: an operator that becomes another one, such as a window of the whole length, equals it.
#include "laws/law.hpp"
#include "support/catch.hpp"

namespace testing::limits_tests {

TEMPLATE_LIST_TEST_CASE("law 8: at its limits an operator equals another", "[limits]", exact_types) {
  for (const auto& op : operators<TestType>())
    for (const auto& limit : op.limits)
      for (law_shape shape : law_shapes()) {
        shape = fitted(op, shape);
        INFO(op.name << ": " << limit.name << ", " << text(shape));
        const law_inputs<TestType> in = random_inputs<TestType>(shape);
        law_result<TestType> one = fresh_result(op, shape), other = fresh_result(op, shape);
        attn::execution serial;
        limit.at_limit(shape)(call_of(in, one, serial));
        limit.equals(shape)(call_of(in, other, serial));
        CHECK(close(op, one, other));
      }
}

}  // namespace testing::limits_tests
