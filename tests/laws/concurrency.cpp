// Law 11. Concurrent calls with separate executions are safe.
#include <thread>

#include "laws/law.hpp"
#include "support/catch.hpp"

namespace testing::concurrency_tests {

TEMPLATE_LIST_TEST_CASE("law 11: concurrent calls with separate executions", "[concurrent]", exact_types) {
  for (const auto& op : operators<TestType>()) {
    const law_shape shape = fitted(op, {.queries = 150, .keys = 150});
    const law_inputs<TestType> in = random_inputs<TestType>(shape);
    const law_result<TestType> wanted = attend(op, shape, in);
    std::vector<law_result<TestType>> results(4);
    std::vector<std::thread> callers;
    for (std::size_t n = 0; n < results.size(); ++n)
      callers.emplace_back([&, n] {
        attn::execution own(n % 2 ? 2 : 1, 0);
        for (int times = 0; times < 3; ++times) results[n] = attend(op, shape, in, own);
      });
    for (auto& caller : callers) caller.join();
    INFO(op.name);
    for (const auto& result : results) CHECK(identical(result, wanted));
  }
}

}  // namespace testing::concurrency_tests
