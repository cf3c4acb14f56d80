// for_each_sequence calls its body once for every sequence, with its part of every view. That operators give what they
// give alone is a law: laws/packed.cpp.
#include <attn/core/packed.hpp>
#include <attn/core/threads.hpp>

#include <atomic>
#include <stdexcept>

#include "support/catch.hpp"
#include "support/refusal.hpp"
#include "support/tensor.hpp"

namespace testing::packed_tests {
namespace {

const std::vector<idx_t> offsets = {2, 5, 5, 100, 101, 140};

}  // namespace

TEST_CASE("packed: every sequence once, with its part of every view", "[packed]") {
  std::vector<float> numbers(150 * 6);
  for (std::size_t n = 0; n < numbers.size(); ++n) numbers[n] = static_cast<float>(n);
  const auto all = attn::blhd_view(std::as_const(numbers).data(), 1, 150, 2, 3);
  const attn::tensor_view<const float, 3> rows(numbers.data(), {1, 1, 150}, {0, 0, 6});
  const attn::tensor_view<const float, 3> layer(numbers.data(), {1, 150, 6});
  const attn::tensor_view<const float, 2> positions(numbers.data(), {1, 150}, {0, 6});
  const Eigen::Map<const Eigen::Matrix<float, 150, 6, Eigen::RowMajor>> matrix(numbers.data());
  const std::vector<idx_t> keys = {0, 3, 3, 7, 150, 150};
  for (int threads : {1, 2, 3})
    for (bool in_order : {false, true}) {
      CAPTURE(threads, in_order);
      attn::execution exec(threads, 0);
      std::vector<std::atomic<int>> called(5);
      std::atomic<int> wrong = 0, inner_threads = 0;
      std::atomic<idx_t> last = -1;
      attn::for_each_sequence(
          {.query_offsets = offsets, .key_offsets = keys, .in_order = in_order}, exec,
          [&](const attn::packed_sequence& s, attn::execution& inner) {
            const auto n = static_cast<std::size_t>(s.number());
            ++called[n];
            const float first = static_cast<float>(6 * offsets[n]);
            const idx_t length = offsets[n + 1] - offsets[n];
            if (in_order && last.exchange(s.number()) >= s.number()) ++wrong;
            if (s.query_length() != length || s.key_length() != keys[n + 1] - keys[n]) ++wrong;
            const auto head = s.queries(all);
            if (head.extents() != std::array<idx_t, 4>{1, 2, length, 3}) ++wrong;
            if (length > 0 && (head(0, 1, 0, 0) != first + 3 || s.queries(rows)(0, 0, 0) != first ||
                               s.queries(layer, 1)(0, 0, 2) != first + 2 || s.queries(positions)(0, 0) != first ||
                               s.queries(matrix)(0, 0, 0, 1) != first + 1))
              ++wrong;
            if (s.keys(all).extent(2) != s.key_length() || s.keys(layer, 1).extent(1) != s.key_length()) ++wrong;
            if (inner.threads() > 1) ++inner_threads;
          });
      CHECK(wrong == 0);
      for (std::size_t n = 0; n < 5; ++n) CHECK(called[n] == (n == 1 ? 0 : 1));  // that one is empty
      CHECK(inner_threads == (threads == 1 ? 0 : 4));  // few and of very different lengths: each by all threads
    }
}

TEST_CASE("packed: empty sequences are passed over", "[packed]") {
  int calls = 0;
  const auto count = [&](const attn::packed_sequence&, attn::execution&) { ++calls; };
  attn::for_each_sequence({.offsets = offsets}, count);
  CHECK(calls == 4);
  const std::vector<idx_t> none = {0}, empty = {3, 3, 3};
  attn::for_each_sequence({.offsets = none}, attn::execution(3), count);
  attn::for_each_sequence({.offsets = empty}, attn::execution(3), count);
  CHECK(calls == 4);
}

TEST_CASE("packed: what the body throws passes through, and its executions keep their scratch", "[packed]") {
  attn::execution exec(2, 0);
  std::vector<idx_t> many;
  for (idx_t n = 0; n <= 40; ++n) many.push_back(n);
  many.push_back(200);  // and one that is longer than its share
  std::atomic<int> wrong = 0;
  const auto use = [&](const attn::packed_sequence& s, attn::execution& inner) {
    if (inner.threads() != (s.query_length() > 1 ? 2 : 1)) ++wrong;
    inner.scratch(0, [](auto& memory) { return memory.template allocate<double>(1000); });
  };
  attn::for_each_sequence({.offsets = many}, exec, use);
  CHECK(wrong == 0);
  CHECK(exec.scratch_bytes() >= 8000);
  CHECK(exec.scratch_bytes() < 40000);
  attn::execution moved = std::move(exec);
  CHECK(moved.scratch_bytes() >= 8000);
  moved.release();
  CHECK(moved.scratch_bytes() == 0);
  std::atomic<int> calls = 0;
  CHECK_THROWS_AS(attn::for_each_sequence({.offsets = many}, moved,
                                          [&](const attn::packed_sequence&, attn::execution&) {
                                            ++calls;
                                            throw std::runtime_error("no");
                                          }),
                  std::runtime_error);
  CHECK(calls <= 2);
}

TEST_CASE("packed: offsets that do not fit are refused", "[packed]") {
  int calls = 0;
  const auto check = [&](const char* says, const attn::packed_offsets& o) {
    const std::string message = refusal(
        [&] { attn::for_each_sequence(o, [&](const attn::packed_sequence&, attn::execution&) { ++calls; }); });
    INFO(message << " should mention " << says);
    CHECK(well_formed(message, "for_each_sequence"));
    CHECK(message.find(says) != std::string::npos);
  };
  const std::vector<idx_t> falling = {0, 5, 4}, negative = {-1, 5}, two = {0, 3}, none;
  check("offsets that do not fall, after 5; found 4", {.offsets = falling});
  check("offsets from 0 on; found -1", {.offsets = negative});
  check("one more than there are sequences", {});
  check("expected offsets, one more than there are sequences; found none", {});
  check("key_offsets, one more", {.query_offsets = two});
  check("query_offsets that do not fall", {.query_offsets = falling, .key_offsets = two});
  check("entries of key_offsets", {.query_offsets = two, .key_offsets = offsets});
  check("either offsets, or query_offsets and key_offsets", {.offsets = two, .key_offsets = two});
  CHECK(calls == 0);
  // The first sequence's slice tells of the last one's end.
  const tensor<float> x(1, 1, 139, 2);
  const attn::tensor_view<const float> view(x.data.data(), x.extents);
  const auto slice = [&](int axis) {
    return refusal([&] {
      attn::for_each_sequence({.offsets = offsets}, [&](const attn::packed_sequence& s, attn::execution&) {
        s.queries(view, axis);
        ++calls;
      });
    });
  };
  CHECK(slice(2) == "attn::for_each_sequence: expected offsets up to the 139 tokens of the view; found 140");
  CHECK(well_formed(slice(4), "for_each_sequence"));
  CHECK(well_formed(slice(-1), "for_each_sequence"));
  CHECK(calls == 0);
}

}  // namespace testing::packed_tests
