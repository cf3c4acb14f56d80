// Law 5. Causality: changing, even to NaN, what lies in the future changes no earlier output bit.
#include "laws/law.hpp"
#include "support/catch.hpp"

namespace testing {

TEMPLATE_LIST_TEST_CASE("law 5: the future changes no earlier bit", "[causality]", exact_types) {
  for (const auto& op : operators<TestType>()) {
    if (!op.causal) continue;
    for (law_shape shape : law_shapes({2, 7, 16, 63, 64, 65, 127, 130, 257})) {
      shape = fitted(op, shape);
      const law_inputs<TestType> in = random_inputs<TestType>(shape);
      const law_result<TestType> before = attend(op, shape, in);
      const index length = shape.queries;
      for (index now : {index(1), length / 3, length / 2 + 1, length - 1}) {  // rows before `now` must not change
        INFO(op.name << ", " << text(shape) << ", future from " << now);
        law_inputs<TestType> poisoned = in, other = random_inputs<TestType>(shape, 9), large = in;
        for (index b = 0; b < shape.batch; ++b)
          for (auto* x : {&poisoned.q, &poisoned.k, &poisoned.v}) spoil(*x, b, now, length);
        const auto keep = [&](tensor<TestType>& to, const tensor<TestType>& from) {
          for (index b = 0; b < to.batch(); ++b)
            for (index h = 0; h < to.heads(); ++h)
              for (index i = 0; i < now; ++i)
                for (index d = 0; d < to.dim(); ++d) to(b, h, i, d) = from(b, h, i, d);
        };
        for (auto* x : {&large.q, &large.k, &large.v})
          for (TestType& number : x->data) number *= TestType(1e5);
        for (auto* x : {&other, &large}) keep(x->q, in.q), keep(x->k, in.k), keep(x->v, in.v);
        for (const auto& changed : {poisoned, other, large}) {
          const law_result<TestType> after = attend(op, shape, changed);
          CHECK(identical(rows(after.out, 0, now), rows(before.out, 0, now)));
          if (op.lse) CHECK(identical(rows(after.lse, 0, now), rows(before.lse, 0, now)));
        }
      }
    }
  }
}

}  // namespace testing
