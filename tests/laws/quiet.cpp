// Law 10. Quiet: a NaN in one key or value reaches only the queries that see it. Those it does reach.
#include "laws/law.hpp"
#include "support/catch.hpp"

namespace testing {
namespace {

template <class T>
void check_quiet(const law_operator<T>& op, const law_shape& shape, law_inputs<T> in, const law_result<T>& before,
                 index spoilt, bool in_key) {
  const index b = 1, kv_head = 1;
  (in_key ? in.k : in.v)(b, kv_head, spoilt, 0) = std::numeric_limits<T>::quiet_NaN();
  const law_result<T> after = attend(op, shape, in);

  const index group = shape.heads / shape.kv_heads;
  bool others_same = true, seers_know = true;
  for (index item = 0; item < shape.batch; ++item)
    for (index h = 0; h < shape.heads; ++h)
      for (index i = 0; i < shape.queries; ++i) {
        const bool seen = item == b && h / group == kv_head && op.sees(shape, item, h, i, spoilt);
        if (seen) {
          seers_know = seers_know && std::isnan(after.out(item, h, i, 0));
          continue;
        }
        for (index d = 0; d < shape.value_dim; ++d)
          others_same = others_same && after.out(item, h, i, d) == before.out(item, h, i, d);
        if (op.lse) others_same = others_same && after.lse(item, h, i, 0) == before.lse(item, h, i, 0);
      }
  CHECK(others_same);
  CHECK(seers_know);
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("law 10: a NaN reaches only those who see it", "[quiet]", exact_types) {
  for (const auto& op : operators<TestType>()) {
    if (!op.sees) continue;
    for (law_shape shape : law_shapes({1, 7, 64, 65, 130, 257})) {
      shape = fitted(op, shape);
      const law_inputs<TestType> in = random_inputs<TestType>(shape);
      const law_result<TestType> before = attend(op, shape, in);
      for (index spoilt : {index(0), shape.keys / 2, shape.keys - 1})
        for (bool in_key : {false, true}) {
          INFO(op.name << ", " << text(shape) << ", NaN in " << (in_key ? "key " : "value ") << spoilt);
          check_quiet(op, shape, in, before, spoilt, in_key);
        }
    }
  }
}

}  // namespace testing
