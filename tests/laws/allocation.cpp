// Law 11. No allocation in a serial call once the execution's scratch memory has grown to the largest shape used.
#include <atomic>

#include "laws/law.hpp"
#include "support/allocations.hpp"
#include "support/catch.hpp"

namespace testing::allocation_tests {

TEST_CASE("law 11: the counter counts", "[allocation]") {
  std::atomic<const void*> seen;  // so that the compiler cannot leave the pairs out
  const std::size_t before = allocations();
  int* const number = new int;
  void* const memory = std::malloc(100);
  seen = number;
  seen = memory;
  delete number;
  std::free(memory);
  const Eigen::VectorXf vector = Eigen::VectorXf::Zero(1000);
  seen = vector.data();
  CHECK(allocations() - before >= counted_ways);
  CHECK(seen == vector.data());
}

TEMPLATE_LIST_TEST_CASE("law 11: no allocation once scratch has grown", "[allocation]", exact_types) {
  for (const auto& op : operators<TestType>()) {
    attn::execution serial;
    for (bool grown : {false, true})
      for (law_shape shape : law_shapes({0, 7, 64, 65, 130, 257})) {
        shape = fitted(op, shape);
        const law_inputs<TestType> in = random_inputs<TestType>(shape);
        law_result<TestType> r = fresh_result(op, shape);
        const bound<TestType> run = op.bind(shape);
        const law_call<TestType> call = call_of(in, r, serial),
                                 item = call_of(in, r, serial, {shape.keys / 2, shape.keys});
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

TEMPLATE_LIST_TEST_CASE("law 11: no allocation in a step of a stream", "[allocation]", exact_types) {
  for (const auto& op : operators<TestType>()) {
    if (!op.stream) continue;
    attn::execution serial;
    const law_shape shape = fitted(op, {.queries = 300, .keys = 300, .dim = 33});
    const law_inputs<TestType> in = random_inputs<TestType>(shape);
    law_result<TestType> r = fresh_result(op, shape);
    for (bool grown : {false, true}) {
      const bound<TestType> state = op.stream(shape);  // caches come with their memory reserved
      std::size_t allocated = 0;
      for (idx_t begin = 0, count = 17; begin + count <= 300; begin += count, count = begin % 2 ? 1 : 17) {
        law_call<TestType> call = call_of(in, r, serial);
        call.q = call.q.slice(2, begin, count), call.k = call.k.slice(2, begin, count);
        call.v = call.v.slice(2, begin, count), call.out = call.out.slice(2, begin, count);
        if (op.lse) call.lse = call.lse.slice(2, begin, count);
        if (begin % 3 == 0) call.lengths = {count, count / 2};  // items need not go in step
        const std::size_t before = allocations();
        state(call);
        allocated += allocations() - before;
      }
      if (!grown) continue;
      INFO(op.name);
      CHECK(allocated == 0);
    }
  }
}

}  // namespace testing::allocation_tests
