// Law 2. Independence: a batch of heads gives bitwise what each head alone gives.
#include "laws/law.hpp"
#include "support/catch.hpp"

namespace testing::independence_tests {

TEMPLATE_LIST_TEST_CASE("law 2: each head stands alone", "[independence]", exact_types) {
  for (const auto& op : operators<TestType>()) {
    if (!op.independent) continue;
    std::vector<law_shape> shapes = law_shapes();
    // Few queries over many keys, by which kernel their group does not say.
    if (op.cross) shapes.push_back({.batch = 1, .heads = 4, .kv_heads = 1, .queries = 8, .keys = 700, .dim = 24});
    for (law_shape shape : shapes) {
      shape = fitted(op, shape);
      INFO(op.name << ", " << text(shape));
      const law_inputs<TestType> in = random_inputs<TestType>(shape);
      const law_result<TestType> together = attend(op, shape, in);
      bool same = true;
      for (idx_t b = 0; b < shape.batch; ++b)
        for (idx_t h = 0; h < shape.heads; ++h) {
          law_shape alone = shape;
          alone.batch = alone.heads = alone.kv_heads = 1;
          alone.first_batch = b, alone.first_head = h;
          const idx_t kv_head = h / (shape.heads / shape.kv_heads);
          const law_result<TestType> single =
              attend(op, alone, {head(in.q, b, h), head(in.k, b, kv_head), head(in.v, b, kv_head)});
          same = same && identical(single.out, head(together.out, b, h));
          if (op.lse) same = same && identical(single.lse, head(together.lse, b, h));
        }
      CHECK(same);
    }
  }
}

}  // namespace testing::independence_tests
