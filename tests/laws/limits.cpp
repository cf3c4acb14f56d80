// Law 8. Limits: an operator that becomes another one, such as a window of the whole length, equals it.
#include "laws/gradient_law.hpp"
#include "support/catch.hpp"

namespace testing::limits_tests {
namespace {

template <class T>
void check_limit(const law_operator<T>& op, const law_limit<T>& limit, const law_shape& shape) {
  INFO(op.name << ": " << limit.name << ", " << text(shape));
  const law_inputs<T> in = random_inputs<T>(shape);
  law_result<T> one = fresh_result(op, shape), other = fresh_result(op, shape);
  attn::execution serial;
  limit.at_limit(shape)(call_of(in, one, serial));
  limit.equals(shape)(call_of(in, other, serial));
  CHECK((limit.to_the_bit ? identical(one, other) : close(op, one, other)));
  if (!limit.backward_equals) return;
  const tensor<T> d_out = random_d_out<T>(shape);
  const auto gradients = [&](const backward_binder<T>& backward) {
    law_gradients<T> g = fresh_gradients(op, shape);
    law_backward_call<T> call = call_of(in, one, d_out, g, serial);
    call.parameters = &g.parameters;
    backward(shape)(call);
    return g;
  };
  CHECK(identical(gradients(limit.backward_at_limit), gradients(limit.backward_equals)));
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("law 8: at its limits an operator equals another", "[limits]", exact_types) {
  for (const auto& op : operators<TestType>())
    for (const auto& limit : op.limits) {
      for (const law_shape& shape : law_shapes()) check_limit(op, limit, fitted(op, shape));
      if (limit.to_the_bit && op.cross)
        for (auto [queries, keys] : {std::pair<idx_t, idx_t>{3, 300}, {70, 20}})
          check_limit(op, limit, fitted(op, {.queries = queries, .keys = keys}));
    }
}

}  // namespace testing::limits_tests
