// The laws that apply to layers: batch items are independent, layouts, threads and callers make no difference, and
// what is not finite stays in its batch item.
#include <thread>

#include "layers/table.hpp"

namespace testing {

TEMPLATE_LIST_TEST_CASE("layers: a batch gives what each item alone gives", "[layer_laws]", exact_types) {
  for (const auto& op : layers<TestType>())
    for (index length : lengths) {
      INFO(op.name << ", length " << length);
      const auto x = input<TestType>(3, length), all = result(op, x);
      for (index b = 0; b < 3; ++b) CHECK(head(all, b, 0) == result(op, head(x, b, 0)));
    }
}

TEMPLATE_LIST_TEST_CASE("layers: any strides give the same bits", "[layer_laws]", exact_types) {
  // batch, length and feature strides of [3, length, width] in a memory of their own
  const auto column_major = [](index length) { return std::array<index, 3>{length * width, 1, length}; };
  const auto batch_fastest = [](index) { return std::array<index, 3>{1, 3 * width, 3}; };
  const auto wide_rows = [](index length) { return std::array<index, 3>{length * (width + 5), width + 5, 1}; };
  const std::function<std::array<index, 3>(index)> layouts[] = {column_major, batch_fastest, wide_rows};
  for (const auto& op : layers<TestType>())
    for (index length : {1, 7, 65})
      for (const auto& layout : layouts) {
        INFO(op.name << ", length " << length);
        const auto x = input<TestType>(3, length), wanted = result(op, x);
        const std::size_t size = static_cast<std::size_t>(3 * length * (width + 5));
        std::vector<TestType> x_memory(size), out_memory(size);
        const out_sequence<TestType> placed{x_memory.data(), {3, length, width}, layout(length)};
        const out_sequence<TestType> out{out_memory.data(), {3, length, width}, layout(length)};
        tensor<TestType> found = wanted;
        for (index b = 0; b < 3; ++b)
          for (index i = 0; i < length; ++i)
            for (index d = 0; d < width; ++d) placed(b, i, d) = x(b, 0, i, d);
        attn::execution serial;
        op.run(placed, out, serial);
        for (index b = 0; b < 3; ++b)
          for (index i = 0; i < length; ++i)
            for (index d = 0; d < width; ++d) found(b, 0, i, d) = out(b, i, d);
        CHECK(found == wanted);
      }
}

TEMPLATE_LIST_TEST_CASE("layers: any number of threads gives the same bits", "[layer_threads]", exact_types) {
  attn::execution two(2), five(5);
  for (const auto& op : layers<TestType>())
    for (index length : lengths) {
      INFO(op.name << ", length " << length);
      const auto x = input<TestType>(3, length), wanted = result(op, x);
      CHECK(result(op, x, two) == wanted);
      CHECK(result(op, x, five) == wanted);
    }
}

TEMPLATE_LIST_TEST_CASE("layers: concurrent calls with separate executions", "[layer_threads]", exact_types) {
  const auto x = input<TestType>(2, 100);
  for (const auto& op : layers<TestType>()) {
    const auto wanted = result(op, x);
    std::vector<tensor<TestType>> results(4);
    std::vector<std::thread> callers;
    for (std::size_t n = 0; n < results.size(); ++n)
      callers.emplace_back([&, n] {
        attn::execution own(n % 2 ? 2 : 1);
        for (int times = 0; times < 3; ++times) results[n] = result(op, x, own);
      });
    for (auto& caller : callers) caller.join();
    INFO(op.name);
    for (const auto& found : results) CHECK(found == wanted);
  }
}

TEMPLATE_LIST_TEST_CASE("layers: what is not finite stays in its batch item", "[layer_laws]", exact_types) {
  constexpr TestType bad[] = {std::numeric_limits<TestType>::quiet_NaN(), std::numeric_limits<TestType>::infinity()};
  for (const auto& op : layers<TestType>())
    for (TestType value : bad) {
      const auto x = input<TestType>(3, 50), clean = result(op, x);
      auto spoilt = x;
      spoilt(1, 0, 20, 3) = value;
      const auto found = result(op, spoilt);
      INFO(op.name);
      CHECK(head(found, 0, 0) == head(clean, 0, 0));
      CHECK(head(found, 2, 0) == head(clean, 2, 0));
    }
}

}  // namespace testing
