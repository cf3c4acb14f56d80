// The laws that apply to layers: batch items are independent, layouts, threads and callers make no difference, and
// what is not finite stays where it is seen.
#include <thread>
#include <utility>

#include "layers/table.hpp"
#include "support/refusal.hpp"

namespace testing::laws_tests {

TEMPLATE_LIST_TEST_CASE("layers: a batch gives what each item alone gives", "[layer_laws]", exact_types) {
  for (const auto& op : layers<TestType>())
    for (idx_t length : lengths) {
      INFO(op.name << ", length " << length);
      const auto x = input(op, 3, length), all = result(op, x);
      for (idx_t b = 0; b < 3; ++b) CHECK(head(all, b, 0) == result(op, head(x, b, 0)));
    }
}

TEMPLATE_LIST_TEST_CASE("layers: any strides give the same bits, and gaps are neither read nor written", "[layer_laws]",
                        exact_types) {
  struct layout {
    std::array<idx_t, 3> strides;  // of batch, length and features, in a memory of NaN
    idx_t first;                   // where the first number lies
  };
  for (const auto& op : layers<TestType>())
    for (idx_t length : {1, 7, 65}) {
      const idx_t width = op.width, size = 4 * length * (width + 5);
      const layout layouts[] = {{{length * width, 1, length}, 0},           // column-major
                                {{1, 4 * width, 4}, 0},                     // three items of four, side by side
                                {{length * (width + 5), width + 5, 1}, 0},  // rows with gaps
                                {{-length * width, -width, -1}, 3 * length * width - 1}};  // backwards
      const auto x = input(op, 3, length), wanted = result(op, x);
      for (const layout& l : layouts) {
        INFO(op.name << ", length " << length << ", strides of " << l.strides[0] << ", " << l.strides[1] << ", "
                     << l.strides[2]);
        constexpr TestType nan = std::numeric_limits<TestType>::quiet_NaN();
        std::vector<TestType> x_memory(static_cast<std::size_t>(size), nan), out_memory = x_memory;
        const auto placed = [&](std::vector<TestType>& memory) {
          return out_sequence<TestType>{memory.data() + l.first, {3, length, width}, l.strides};
        };
        const auto from = placed(x_memory), out = placed(out_memory);
        tensor<TestType> found = wanted;
        const auto every_number = [&](auto&& visit) {
          for (idx_t b = 0; b < 3; ++b)
            for (idx_t i = 0; i < length; ++i)
              for (idx_t d = 0; d < width; ++d) visit(b, i, d);
        };
        every_number([&](idx_t b, idx_t i, idx_t d) { from(b, i, d) = x(b, 0, i, d); });
        attn::execution serial;
        op.run(from, out, serial);
        every_number([&](idx_t b, idx_t i, idx_t d) { found(b, 0, i, d) = std::exchange(out(b, i, d), nan); });
        CHECK(found == wanted);
        CHECK(std::all_of(out_memory.begin(), out_memory.end(), [](TestType number) { return std::isnan(number); }));
      }
    }
}

TEMPLATE_LIST_TEST_CASE("layers: any number of threads gives the same bits", "[layer_threads]", all_types) {
  attn::execution two(2, 0), five(5, 0);
  for (const auto& op : layers<TestType>())
    for (idx_t length : lengths) {
      INFO(op.name << ", length " << length);
      const auto x = input(op, 3, length), wanted = result(op, x);
      CHECK(result(op, x, two) == wanted);
      CHECK(result(op, x, five) == wanted);
    }
}

TEMPLATE_LIST_TEST_CASE("layers: concurrent calls with separate executions", "[layer_threads]", exact_types) {
  for (const auto& op : layers<TestType>()) {
    const auto x = input(op, 2, 100), wanted = result(op, x);
    std::vector<tensor<TestType>> results(4);
    std::vector<std::thread> callers;
    for (std::size_t n = 0; n < results.size(); ++n)
      callers.emplace_back([&, n] {
        attn::execution own(n % 2 ? 2 : 1, 0);
        for (int times = 0; times < 3; ++times) results[n] = result(op, x, own);
      });
    for (auto& caller : callers) caller.join();
    INFO(op.name);
    for (const auto& found : results) CHECK(found == wanted);
  }
}

// Padding and, with a causal mixer, the future among it: a decoder's block.
TEMPLATE_LIST_TEST_CASE("layers: what is not finite reaches only rows that see it", "[layer_laws]", exact_types) {
  constexpr TestType bad[] = {std::numeric_limits<TestType>::quiet_NaN(), std::numeric_limits<TestType>::infinity()};
  for (const auto& op : layers<TestType>())
    for (idx_t length : {3, 50}) {
      const auto x = input(op, 3, length), clean = result(op, x);
      for (TestType value : bad)
        for (idx_t at : {idx_t(1), length / 2, length - 1}) {
          auto poisoned = x;
          for (idx_t d = 0; d < op.width; ++d) poisoned(1, 0, at, d) = value;
          const auto found = result(op, poisoned);
          int wrong = 0;
          for (idx_t b = 0; b < 3; ++b)
            for (idx_t i = 0; i < length; ++i) {
              const bool sees = b == 1 && (i == at || (i > at && op.sees == reach::past) || op.sees == reach::sequence);
              for (idx_t d = 0; d < op.width; ++d) wrong += !sees && found(b, 0, i, d) != clean(b, 0, i, d);
            }
          INFO(op.name << ", length " << length << ", " << value << " at token " << at);
          CHECK(wrong == 0);
          CHECK(!std::isfinite(found(1, 0, at, 0)));
        }
    }
}

// Law 13: with execution::set_invariant() a row has the bits that it has among fewer tokens, or the call is refused.
TEMPLATE_LIST_TEST_CASE("layers: rows have the same bits however many there are", "[layer_laws]", exact_types) {
  attn::execution serial, four(4, 0);
  serial.set_invariant(true), four.set_invariant(true);
  constexpr idx_t length = 65;
  for (const auto& op : layers<TestType>()) {
    INFO(op.name);
    const auto x = input(op, 2, length);
    tensor<TestType> whole;
    const std::string message = refusal([&] { whole = result(op, x, serial); });
    const std::string name = op.name.substr(0, op.name.find_first_of(", "));
    if (name == "short_convolution" || name == "token_shift" || name == "multi_head_latent") {
      CHECK(well_formed(message, name));
      continue;
    }
    CAPTURE(message);
    REQUIRE(message.empty());
    CHECK(result(op, x, four) == whole);
    const auto rows = [&](const tensor<TestType>& all, idx_t begin, idx_t count) {
      tensor<TestType> some(2, 1, count, op.width);
      for (idx_t b = 0; b < 2; ++b)
        for (idx_t i = 0; i < count; ++i)
          for (idx_t d = 0; d < op.width; ++d) some(b, 0, i, d) = all(b, 0, begin + i, d);
      return some;
    };
    for (const idx_t count : {1, 2, 7, 9, 48})
      for (const idx_t begin : {idx_t(0), idx_t(5), length - count}) {
        if (op.sees == reach::sequence || (op.sees == reach::past && begin > 0)) continue;
        INFO(count << " tokens from " << begin << " on");
        CHECK(result(op, rows(x, begin, count), count == 7 ? four : serial) == rows(whole, begin, count));
      }
  }
}

}  // namespace testing::laws_tests
