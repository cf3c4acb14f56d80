// The laws that apply to the layers' backward passes: the gradients of inputs are those of each batch item alone,
// layouts, threads and callers make no difference, and what is not finite stays where it is seen.
#include <thread>
#include <utility>

#include "layers/backward_table.hpp"

namespace testing::backward_laws_tests {

TEMPLATE_LIST_TEST_CASE("layers backward: dx of a batch is that of each item alone", "[layer_backward_laws]",
                        exact_types) {
  for (const auto& op : backward_layers<TestType>())
    for (idx_t length : {1, 3, 48, 65}) {
      INFO(op.name << ", length " << length);
      const auto x = input(op, 3, length), d = input(op, 3, length, 10);
      const auto all = result(op, x, d).dx;
      for (idx_t b = 0; b < 3; ++b) CHECK(head(all, b, 0) == result(op, head(x, b, 0), head(d, b, 0)).dx);
    }
}

TEMPLATE_LIST_TEST_CASE("layers backward: any number of threads gives the same bits", "[layer_backward_threads]",
                        all_types) {
  attn::execution two(2, 0), five(5, 0);
  for (const auto& op : backward_layers<TestType>())
    for (idx_t length : {0, 1, 48, 200}) {
      INFO(op.name << ", length " << length);
      const auto x = input(op, 3, length), d = input(op, 3, length, 10);
      const auto wanted = result(op, x, d);
      CHECK(result(op, x, d, two) == wanted);
      CHECK(result(op, x, d, five) == wanted);
    }
}

TEMPLATE_LIST_TEST_CASE("layers backward: concurrent calls with separate executions", "[layer_backward_threads]",
                        exact_types) {
  for (const auto& op : backward_layers<TestType>()) {
    if (calls_attention(op)) continue;
    const auto x = input(op, 2, 100), d = input(op, 2, 100, 10);
    const auto wanted = result(op, x, d);
    std::vector<backward_result<TestType>> results(4);
    std::vector<std::thread> callers;
    for (std::size_t n = 0; n < results.size(); ++n)
      callers.emplace_back([&, n] {
        attn::execution own(n % 2 ? 2 : 1, 0);
        for (int times = 0; times < 3; ++times) results[n] = result(op, x, d, own);
      });
    for (auto& caller : callers) caller.join();
    INFO(op.name);
    for (const auto& found : results) CHECK(found == wanted);
  }
}

TEMPLATE_LIST_TEST_CASE("layers backward: any strides give the same bits, and gaps are neither read nor written",
                        "[layer_backward_laws]", exact_types) {
  struct layout {
    std::array<idx_t, 3> strides;  // of batch, length and features, in a memory of NaN
    idx_t first;                   // where the first number lies
  };
  for (const auto& op : backward_layers<TestType>())
    for (idx_t length : {1, 7, 65}) {
      const idx_t width = op.width, size = 4 * length * (width + 5);
      const layout layouts[] = {{{length * width, 1, length}, 0},           // column-major
                                {{1, 4 * width, 4}, 0},                     // three items of four, side by side
                                {{length * (width + 5), width + 5, 1}, 0},  // rows with gaps
                                {{-length * width, -width, -1}, 3 * length * width - 1}};  // backwards
      const auto x = input(op, 3, length), d = input(op, 3, length, 10);
      const auto wanted = result(op, x, d);
      for (const layout& l : layouts) {
        INFO(op.name << ", length " << length << ", strides of " << l.strides[0] << ", " << l.strides[1] << ", "
                     << l.strides[2]);
        constexpr TestType nan = std::numeric_limits<TestType>::quiet_NaN();
        std::vector<TestType> x_memory(static_cast<std::size_t>(size), nan), d_memory = x_memory, dx_memory = x_memory;
        const auto placed = [&](std::vector<TestType>& memory) {
          return out_sequence<TestType>{memory.data() + l.first, {3, length, width}, l.strides};
        };
        const auto from = placed(x_memory), d_from = placed(d_memory), to = placed(dx_memory);
        const auto every_number = [&](auto&& visit) {
          for (idx_t b = 0; b < 3; ++b)
            for (idx_t i = 0; i < length; ++i)
              for (idx_t e = 0; e < width; ++e) visit(b, i, e);
        };
        every_number(
            [&](idx_t b, idx_t i, idx_t e) { from(b, i, e) = x(b, 0, i, e), d_from(b, i, e) = d(b, 0, i, e); });
        backward_result<TestType> found{wanted.dx, wanted.gradients};
        attn::execution serial;
        op.run(from, d_from, to, found.gradients, serial);
        every_number([&](idx_t b, idx_t i, idx_t e) { found.dx(b, 0, i, e) = std::exchange(to(b, i, e), nan); });
        CHECK(found == wanted);
        CHECK(std::all_of(dx_memory.begin(), dx_memory.end(), [](TestType number) { return std::isnan(number); }));
      }
    }
}

// Padding: a token whose d_out is 0, and which no other token has seen, changes no bit of any gradient, and has none.
TEMPLATE_LIST_TEST_CASE("layers backward: what is not finite in tokens without gradient changes nothing",
                        "[layer_backward_laws]", exact_types) {
  constexpr TestType bad[] = {std::numeric_limits<TestType>::quiet_NaN(), std::numeric_limits<TestType>::infinity()};
  for (const auto& op : backward_layers<TestType>())
    for (idx_t length : {3, 50}) {
      if (op.sees != reach::token) continue;  // for the others it is the operator's lengths that decide
      auto x = input(op, 3, length), d = input(op, 3, length, 10);
      for (idx_t e = 0; e < op.width; ++e) d(1, 0, length - 1, e) = 0;
      const auto clean = result(op, x, d);
      for (TestType value : bad) {
        for (idx_t e = 0; e < op.width; ++e) x(1, 0, length - 1, e) = value;
        INFO(op.name << ", length " << length << ", " << value);
        CHECK(result(op, x, d) == clean);
        for (idx_t e = 0; e < op.width; ++e) CHECK(clean.dx(1, 0, length - 1, e) == 0);
      }
    }
}

TEMPLATE_LIST_TEST_CASE("layers backward: a gradient that is not finite reaches only the rows that led to it",
                        "[layer_backward_laws]", exact_types) {
  for (const auto& op : backward_layers<TestType>())
    for (idx_t length : {3, 50})
      for (idx_t at : {idx_t(0), length / 2, length - 1}) {
        const auto x = input(op, 3, length);
        auto d = input(op, 3, length, 10);
        const auto clean = result(op, x, d).dx;
        for (idx_t e = 0; e < op.width; ++e) d(1, 0, at, e) = std::numeric_limits<TestType>::quiet_NaN();
        const auto found = result(op, x, d).dx;
        int wrong = 0;
        for (idx_t b = 0; b < 3; ++b)
          for (idx_t i = 0; i < length; ++i) {
            const bool led = b == 1 && (i == at || (i < at && op.sees == reach::past) || op.sees == reach::sequence);
            for (idx_t e = 0; e < op.width; ++e) wrong += !led && found(b, 0, i, e) != clean(b, 0, i, e);
          }
        INFO(op.name << ", length " << length << ", at token " << at);
        CHECK(wrong == 0);
        CHECK(!std::isfinite(found(1, 0, at, 0)));
      }
}

}  // namespace testing::backward_laws_tests
