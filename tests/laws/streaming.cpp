// Law 6. Streaming: token by token, in chunks and all at once agree.
#include "laws/law.hpp"
#include "support/catch.hpp"

namespace testing::streaming_tests {
namespace {

// Chunks that add up to `length`: single tokens, one chunk, or a mixture.
std::vector<std::vector<idx_t>> feedings(idx_t length) {
  std::vector<idx_t> mixed;
  for (idx_t fed = 0, next = 1; fed < length; fed += mixed.back(), next = next * 3 % 50)
    mixed.push_back(std::min(next, length - fed));
  return {std::vector<idx_t>(static_cast<std::size_t>(length), 1), {length}, mixed};
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("law 6: token by token, in chunks and at once agree", "[streaming]", exact_types) {
  for (const auto& op : operators<TestType>()) {
    if (!op.stream) continue;
    for (law_shape shape : law_shapes()) {
      shape = fitted(op, shape);
      const law_inputs<TestType> in = random_inputs<TestType>(shape);
      const law_result<TestType> at_once = attend(op, shape, in);
      for (const auto& chunks : feedings(shape.queries)) {
        INFO(op.name << ", " << text(shape) << ", in " << chunks.size() << " chunks");
        CHECK(close(op, attend_in_chunks(op, shape, in, chunks), at_once));
      }
    }
  }
}

}  // namespace testing::streaming_tests
