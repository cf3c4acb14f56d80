// Law 11 of gradients. No allocation in a serial call once the execution's scratch memory has grown.
#include "laws/gradient_law.hpp"
#include "support/allocations.hpp"
#include "support/catch.hpp"

namespace testing::gradients_allocation_tests {

TEMPLATE_LIST_TEST_CASE("law 11 of gradients: no allocation once scratch has grown", "[gradient_allocation]",
                        exact_types) {
  using T = TestType;
  for (const auto& op : operators<T>()) {
    if (!op.backward) continue;
    attn::execution serial;
    for (bool grown : {false, true})
      for (law_shape shape : law_shapes({0, 7, 64, 65, 130, 257})) {
        shape = fitted(op, shape);
        const law_inputs<T> in = random_inputs<T>(shape);
        const tensor<T> d_out = random_d_out<T>(shape);
        const std::vector<index> lengths = {shape.keys / 2, shape.keys};
        attn::execution apart;  // the forward call's scratch is not what is looked at
        law_result<T> whole = attend(op, shape, in, apart), padded = attend(op, shape, in, apart, lengths);
        law_gradients<T> g = fresh_gradients(op, shape);
        const auto run = op.backward(shape);
        const law_backward_call<T> call = call_of(in, whole, d_out, g, serial);
        const law_backward_call<T> item = call_of(in, padded, d_out, g, serial, lengths);
        const std::size_t before = allocations(), scratch = serial.scratch_bytes();
        run(call);
        run(item);
        const std::size_t after = allocations();
        if (!grown) continue;
        INFO(op.name << ", " << text(shape));
        CHECK(after == before);
        CHECK(serial.scratch_bytes() == scratch);
      }
  }
}

}  // namespace testing::gradients_allocation_tests
