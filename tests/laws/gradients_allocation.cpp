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
    attn::execution serial, of_forward;  // the forward call's scratch is not what is looked at
    struct problem {
      law_shape shape;
      law_inputs<T> in;
      tensor<T> d_out;
      std::vector<idx_t> lengths;
      law_result<T> whole, padded;
    };
    std::vector<problem> problems;
    for (law_shape shape : law_shapes({0, 7, 64, 65, 130, 257})) {
      shape = fitted(op, shape);
      problem p{shape, random_inputs<T>(shape), random_d_out<T>(shape), {shape.keys / 2, shape.keys}, {}, {}};
      p.whole = attend(op, shape, p.in, of_forward), p.padded = attend(op, shape, p.in, of_forward, p.lengths);
      problems.push_back(std::move(p));
    }
    for (bool grown : {false, true})
      for (problem& p : problems) {
        law_gradients<T> g = fresh_gradients(op, p.shape);
        const auto run = op.backward(p.shape);
        const law_backward_call<T> call = call_of(p.in, p.whole, p.d_out, g, serial);
        const law_backward_call<T> item = call_of(p.in, p.padded, p.d_out, g, serial, p.lengths);
        const std::size_t before = allocations(), scratch = serial.scratch_bytes();
        run(call);
        run(item);
        const std::size_t after = allocations();
        if (!grown) continue;
        INFO(op.name << ", " << text(p.shape));
        CHECK(after == before);
        CHECK(serial.scratch_bytes() == scratch);
      }
  }
}

}  // namespace testing::gradients_allocation_tests
