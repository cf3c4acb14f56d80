// The bound between the fast product and the exact sums, from both sides: what is safe is not computed again, what is
// not is, and both are right.
#include <attn/aft/aft_full.hpp>

#include <cmath>

#include "support/catch.hpp"

namespace testing {
namespace {

using namespace attn::detail;
using attn::index;

struct outcome {
  index repeated;  // rows of packets computed again
  float out;
};

// One row that sees two keys alike: k = gap and -gap, w = -gap and gap. Their values are 1 and 3 times `size`.
outcome mean_of_two(float gap, float size) {
  const float k[] = {gap, -gap}, v[] = {size, 3 * size}, w[] = {-gap, gap}, q[] = {0};
  float out[] = {7};
  const aft_head<float> head{{q, 1, 1, 1, 1}, {k, 2, 1, 1, 1}, {v, 2, 1, 1, 1}, {out, 1, 1, 1, 1}};
  attn::execution serial;
  packed_keys<float> keys;
  auto block = serial.scratch(0, [&](carver& memory) {
    keys = packed_keys<float>::layout(memory, 1, 2);
    return aft_block<float>::layout(memory, 1, false);
  });
  const full_bias<float> bias{{w, 1, 2, 2, 1}, 0, 2, false};
  const aft_rows<float, full_bias<float>> rows{block, {&head, 1}, bias, 0, 1, nullptr, false};
  block.begin(1);
  rows.find_row_tops();
  keys.pack(head.k, head.v, 0, 0, 2);
  rows.take(keys, 0, 0, 2);
  const index repeated = rows.finish(2);
  return {repeated, out[0]};
}

}  // namespace

TEST_CASE("aft_block: the bound of the fast product, from both sides", "[aft_block]") {
  // den is 2 e^(-2 gap) beside the largest k and the largest w; the fast product is trusted down to 3 * 2^-97, which is
  // a gap of 33.4. From 43.7 on both weights would be 0.
  for (float gap : {0.0f, 1.0f, 20.0f, 30.0f, 32.0f, 33.0f}) {
    INFO("gap " << gap);
    const outcome result = mean_of_two(gap, 1);
    CHECK(result.repeated == 0);
    CHECK(std::abs(result.out - 2) <= 1e-6f);
  }
  for (float gap : {34.0f, 40.0f, 43.0f, 44.0f, 50.0f, 100.0f, 1000.0f}) {
    INFO("gap " << gap);
    const outcome result = mean_of_two(gap, 1);
    CHECK(result.repeated == 1);
    CHECK(std::abs(result.out - 2) <= 1e-6f);
  }
}

TEST_CASE("aft_block: smaller values are trusted less", "[aft_block]") {
  // max |v| is 3 * 2^-40, and 3 * 2^-97 / that is reached at a gap of 20.1
  CHECK(mean_of_two(19, 0x1p-40f).repeated == 0);
  CHECK(mean_of_two(21, 0x1p-40f).repeated == 1);
  CHECK(mean_of_two(33, 0x1p40f).repeated == 0);
  for (float gap : {0.0f, 19.0f, 21.0f, 33.0f, 34.0f, 60.0f})
    for (float size : {0x1p-120f, 0x1p-40f, 0x1p40f, 0x1p120f})
      CHECK(std::abs(mean_of_two(gap, size).out / size - 2) <= 1e-6f);
}

}  // namespace testing
