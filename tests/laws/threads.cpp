// Law 4. Threads: any thread count gives bitwise the same result.
#include "laws/law.hpp"
#include "support/catch.hpp"

namespace testing::threads_tests {

TEMPLATE_LIST_TEST_CASE("law 4: any number of threads gives the same bits", "[threads]", exact_types) {
  // Two shares of each call, the second before the first.
  attn::execution two(2, [](int count, const attn::pool_task& task) { while (count-- > 0) task(count); }, 0);
  attn::execution three(3, 0), seven(7, 0);
  for (const auto& op : operators<TestType>()) {
    std::vector<law_shape> shapes = races_only ? law_shapes({65}) : law_shapes({7, 64, 65, 257, 0, 1});
    law_shape long_head{
        .batch = 1, .heads = 1, .kv_heads = 1, .queries = 1100, .keys = 1100, .dim = 8, .value_dim = 64};
    shapes.push_back(long_head);
    std::swap(long_head.dim, long_head.value_dim);
    if (!few_shapes) shapes.push_back(long_head);
    // More heads than any wave takes.
    if (!few_shapes)
      shapes.push_back({.batch = 4, .heads = 24, .kv_heads = 12, .queries = 140, .keys = 140, .dim = 64});
    shapes.push_back({.batch = 3, .heads = 6, .kv_heads = 2, .queries = 96, .keys = 96, .dim = 24});
    for (law_shape shape : shapes) {
      shape = fitted(op, shape);
      INFO(op.name << ", " << text(shape));
      const law_inputs<TestType> in = random_inputs<TestType>(shape);
      const law_result<TestType> serial = races_only ? law_result<TestType>() : attend(op, shape, in);
      for (attn::execution* threads : {&two, &three, &seven}) {
        if (by_turns<TestType> && threads != &three) continue;
        INFO(threads->threads() << " threads");
        const law_result<TestType> shared = attend(op, shape, in, *threads);
        CHECK((races_only || identical(shared, serial)));
      }
    }
  }
}

TEMPLATE_LIST_TEST_CASE("law 4: fewer queries than threads, many keys", "[threads]", exact_types) {
  attn::execution four(4, 0);
  for (const auto& op : operators<TestType>()) {
    if (!op.cross) continue;
    for (idx_t queries : {1, 2}) {
      const law_shape shape = fitted(op, {.batch = 1, .heads = 2, .kv_heads = 1, .queries = queries, .keys = 3000});
      INFO(op.name << ", " << text(shape));
      const law_inputs<TestType> in = random_inputs<TestType>(shape);
      const law_result<TestType> shared = attend(op, shape, in, four);
      CHECK((races_only || identical(shared, attend(op, shape, in))));
    }
  }
}

}  // namespace testing::threads_tests
