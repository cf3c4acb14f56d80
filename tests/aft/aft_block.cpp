// The bound between the fast product and the exact sums, from both sides: results that have
// underflowed are computed again, others are not, and both are right.
#include <attn/aft/aft_full.hpp>

#include <cmath>
#include <limits>
#include <optional>

#include "support/catch.hpp"

namespace testing::aft_block_tests {
namespace {

using namespace attn::detail;
using attn::idx_t;

struct outcome {
  idx_t recomputed;  // rows of packets
  float out;
};

constexpr float infinity = std::numeric_limits<float>::infinity();

struct particulars {
  float masked = 0;             // the value of a third key, which is masked
  std::optional<float> gate{};  // q
};

// One row that sees two keys alike: k = gap and -gap, w = -gap and gap. Their values are 1 and 3 times `size`.
outcome mean_of_two(float gap, float size, const particulars& more = {}) {
  const float k[] = {gap, -gap, 0}, v[] = {size, 3 * size, more.masked}, w[] = {-gap, gap, -infinity};
  const float q[] = {more.gate.value_or(0)};
  float out[] = {7};
  const aft_head head{{q, 1, 1, 1, 1}, {k, 3, 1, 1, 1}, {v, 3, 1, 1, 1}, {out, 1, 1, 1, 1}};
  attn::execution serial;
  packed_chunk<float> keys;
  auto block = serial.scratch(0, [&](arena& memory) {
    keys = packed_chunk<float>::layout(memory, 1, 3);
    return aft_block<float>::layout(memory, 1, false);
  });
  const auto& elements = elements_of<float>;
  const aft_window_bias<float> bias{.w = {w, 1, 3, 3, 1}, .elements = elements, .grid = {.columns = 3, .side = 3},
                                    .keys = 3, .r = 0, .i = 0};
  const aft_rows<float, aft_window_bias<float>> rows{.block = block,
                                                     .elements = elements,
                                                     .heads = {&head, 1},
                                                     .bias = bias,
                                                     .first = 0,
                                                     .parts = 1,
                                                     .outside = nullptr,
                                                     .gate = more.gate.has_value()};
  block.begin(1);
  rows.find_row_exponents();
  keys.pack(elements, head, 0, 0, 3);
  rows.add_chunk(keys, 0, 3);
  const idx_t recomputed = rows.finish(3);
  return {recomputed, out[0]};
}

}  // namespace

TEST_CASE("aft_block: the bound of the fast product, from both sides", "[aft_block]") {
  // den is 2 e^(-2 gap) beside the largest k and the largest w; the fast product is trusted down to 4 * 2^-97, which is
  // a gap of 33.3. From 43.7 on both weights would be 0.
  for (float gap : {0.0f, 1.0f, 20.0f, 30.0f, 32.0f, 33.0f}) {
    INFO("gap " << gap);
    const outcome result = mean_of_two(gap, 1);
    CHECK(result.recomputed == 0);
    CHECK(std::abs(result.out - 2) <= 1e-6f);
  }
  for (float gap : {34.0f, 40.0f, 43.0f, 44.0f, 50.0f, 100.0f, 1000.0f}) {
    INFO("gap " << gap);
    const outcome result = mean_of_two(gap, 1);
    CHECK(result.recomputed == 1);
    CHECK(std::abs(result.out - 2) <= 1e-6f);
  }
}

TEST_CASE("aft_block: smaller values need recomputation earlier", "[aft_block]") {
  // num is 2 * 2^-40 den, and 4 * 2^-97 is reached at a gap of 19.8
  CHECK(mean_of_two(19, 0x1p-40f).recomputed == 0);
  CHECK(mean_of_two(21, 0x1p-40f).recomputed == 1);
  CHECK(mean_of_two(33, 0x1p40f).recomputed == 0);
  for (float gap : {0.0f, 19.0f, 21.0f, 33.0f, 34.0f, 60.0f})
    for (float size : {0x1p-120f, 0x1p-40f, 0x1p40f, 0x1p120f})
      CHECK(std::abs(mean_of_two(gap, size).out / size - 2) <= 1e-6f);
}

TEST_CASE("aft_block: a masked value does not raise the bound", "[aft_block]") {
  for (float masked : {0.0f, 1e-30f, 1.0f, 1e30f, infinity, std::numeric_limits<float>::quiet_NaN()})
    for (float gap : {0.0f, 10.0f, 20.0f, 25.0f, 30.0f, 33.0f, 34.0f, 40.0f, 60.0f})
      for (int exponent = -120; exponent <= 100; exponent += 10) {
        INFO("masked " << masked << ", gap " << gap << ", size 2^" << exponent);
        const float size = std::ldexp(1.0f, exponent);
        CHECK(std::abs(mean_of_two(gap, size, {.masked = masked}).out / size - 2) <= 1e-6f);
      }
}

TEST_CASE("aft_block: values that cancel need no recomputation", "[aft_block]") {
  const auto bound = [](float num, float den, float smallest) {
    return sum_lanes(sum_lower_bound<float>(broadcast<float>(num), broadcast<float>(den), broadcast<float>(smallest))) /
           width<float>;
  };
  CHECK(bound(0, 0.5f, 0x1p-10f) == 0x1p-11f);        // by the smallest value
  CHECK(bound(-0x1p-5f, 0.5f, 0x1p-10f) == 0x1p-5f);  // by num
  CHECK(bound(0x1p10f, 0.5f, 0x1p20f) == 0.5f);       // no more than den
  CHECK(bound(0, 0.5f, infinity) == 0.5f);            // all values are 0
  CHECK(trusted_sum<float>(1023) == 0x1p-87f);
  CHECK(trusted_sum<double>(1023) == 0x1p-954);
}

TEST_CASE("aft_block: the gate does not make a tiny numerator underflow", "[aft_block]") {
  // den is 2^-94 and num alike: times sigmoid(-40) = 2^-57.7 it would be 0
  for (float gap : {0.0f, 20.0f, 33.0f, 40.0f})
    for (float q : {-60.0f, -40.0f, -20.0f, 0.0f, 20.0f}) {
      INFO("gap " << gap << ", q " << q);
      const double exact = 2 / (1 + std::exp(-double(q)));
      CHECK(std::abs(mean_of_two(gap, 1, {.gate = q}).out - exact) <= 1e-6 * exact);
    }
}

// An image of one column, whose kernel is as tall as it is: lines of padding are neither added up nor looked at one by
// one (law 1).
TEST_CASE("aft_window: sums of lines follow the true length", "[aft_block]") {
  constexpr idx_t lines = 4096, heads = 3, length = 16, adds = 3;  // of a line: before it, after it, all of it
  const aft_window_grid grid{.layout = aft_window_layout::kernel, .lines = lines, .columns = 1, .up = lines / 2};
  attn::execution serial;
  const auto sums = serial.shared_scratch(
      [&](arena& memory) { return aft_window_sums<float>::layout(memory, grid, heads, 1); });
  idx_t added = 0, asked = 0;
  sums.sum(
      heads, serial, [&](idx_t, idx_t, idx_t, key_sums<float>*) { ++added; }, [&](idx_t) { return ++asked, length; });
  CHECK(added <= heads * length * adds);
  CHECK(asked <= heads * (length * adds + 3 * 64));  // three loops over at most 64 parts of a head
  const aft_window_bias<float> bias{
      .w = {}, .elements = elements_of<float>, .grid = grid, .keys = length, .r = 0, .i = 0};
  idx_t seen = 0, seen_lines = 0;
  for (idx_t line = bias.first_line(); line < bias.end_line(); ++line, ++seen_lines)
    if (const auto [begin, end] = bias.keys_of(line); begin < end) seen += end - begin;
  CHECK(seen == length);
  CHECK(seen_lines <= length);
}

}  // namespace testing::aft_block_tests
