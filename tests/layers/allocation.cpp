// No allocation in a serial call of a layer once the execution's scratch memory has grown.
#include "layers/table.hpp"
#include "support/allocations.hpp"

namespace testing {

TEMPLATE_LIST_TEST_CASE("layers: no allocation once scratch has grown", "[layer_allocation]", exact_types) {
  for (const auto& op : layers<TestType>()) {
    attn::execution serial;
    for (bool grown : {false, true})
      for (index length : lengths) {
        const auto x = input(op, 2, length);
        auto out = x;
        const std::size_t before = allocations(), scratch = serial.scratch_bytes();
        op.run(sequence(x), sequence(out), serial);
        const std::size_t after = allocations();
        if (!grown) continue;
        INFO(op.name << ", length " << length);
        CHECK(after == before);
        CHECK(serial.scratch_bytes() == scratch);
      }
  }
}

}  // namespace testing
