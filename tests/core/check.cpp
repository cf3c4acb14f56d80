// Views that share memory are always found out; views people lay side by side in one buffer are not suspected.
#include <attn/core/detail/call_views.hpp>

#include <set>
#include <vector>

#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/refusal.hpp"

namespace testing::check_tests {
using attn::tensor_view;

namespace {

std::multiset<const float*> elements(const tensor_view<float>& x) {
  std::multiset<const float*> all;
  for (idx_t b = 0; b < x.extent(0); ++b)
    for (idx_t h = 0; h < x.extent(1); ++h)
      for (idx_t i = 0; i < x.extent(2); ++i)
        for (idx_t d = 0; d < x.extent(3); ++d) all.insert(&x(b, h, i, d));
  return all;
}

bool share(const tensor_view<float>& x, const tensor_view<float>& y) {
  const auto a = elements(x), b = elements(y);
  for (const float* element : a)
    if (b.count(element)) return true;
  return false;
}

bool overlaps_itself(const tensor_view<float>& x) {
  const auto all = elements(x);
  return std::set<const float*>(all.begin(), all.end()).size() != all.size();
}

tensor_view<float> random_view(random_source& random, std::vector<float>& memory) {
  std::array<idx_t, 4> extents, strides;
  const idx_t steps[] = {0, 1, 2, 3, 4, 6, 8, 12, -1, -2, -4, -12};
  for (int axis = 0; axis < 4; ++axis) {
    extents[static_cast<std::size_t>(axis)] = 1 + random.below(3);
    strides[static_cast<std::size_t>(axis)] = steps[random.below(12)];
  }
  return {memory.data() + 200 + random.below(40), extents, strides};
}

}  // namespace

TEST_CASE("shared memory is never missed, for any strides", "[check]") {
  random_source random(11);
  std::vector<float> memory(500);
  int shared = 0, missed = 0, self = 0, self_missed = 0;
  for (int n = 0; n < 20000; ++n) {
    const auto x = random_view(random, memory), y = random_view(random, memory);
    if (share(x, y)) ++shared, missed += !attn::detail::may_share(x, y);
    if (overlaps_itself(x)) ++self, self_missed += !attn::detail::moving_axes(x).elements_overlap();
  }
  CHECK(shared > 1000);
  CHECK(self > 1000);
  CHECK(missed == 0);
  CHECK(self_missed == 0);
}

TEST_CASE("pieces of one buffer that do not overlap are accepted", "[check]") {
  constexpr idx_t batch = 2, heads = 3, length = 5, dim = 4;
  std::vector<float> memory(4 * batch * heads * length * dim);
  const auto piece = [&](idx_t n) {  // q, k, v and out as slices of one fused projection
    return tensor_view<float>(memory.data() + n * heads * dim, {batch, heads, length, dim},
                              {length * 4 * heads * dim, dim, 4 * heads * dim, 1});
  };
  for (idx_t a = 0; a < 4; ++a) {
    CHECK_FALSE(attn::detail::moving_axes(piece(a)).elements_overlap());
    for (idx_t b = 0; b < 4; ++b) {
      CAPTURE(a, b);
      CHECK(attn::detail::may_share(piece(a), piece(b)) == (a == b));
    }
  }
  Eigen::MatrixXf columns(7, 8);
  CHECK_FALSE(
      attn::detail::may_share(tensor_view<float>(columns.leftCols(4)), tensor_view<float>(columns.rightCols(4))));
  CHECK_FALSE(
      attn::detail::may_share(tensor_view<float>(columns.topRows(4)), tensor_view<float>(columns.bottomRows(3))));
  CHECK(attn::detail::may_share(tensor_view<float>(columns.topRows(4)), tensor_view<float>(columns.bottomRows(4))));
}

TEST_CASE("an empty view shares nothing", "[check]") {
  std::vector<float> memory(16);
  const tensor_view<float> full(memory.data(), {1, 1, 4, 4}), empty(memory.data(), {1, 1, 0, 4});
  CHECK_FALSE(attn::detail::may_share(full, empty));
  CHECK_FALSE(attn::detail::moving_axes(empty).elements_overlap());
}

// Found by the undefined-behaviour sanitizer: addresses are numbers, since null is no array to point into.
TEST_CASE("a null view is told by its extents, whatever its strides", "[check]") {
  const auto says = [](idx_t rows) {
    return refusal([&] {
      attn::detail::call_views views("call");
      views.read("x", tensor_view<const float>(nullptr, {1, 3, rows, 4}, {-12, -4, -4, -1}));
    });
  };
  CHECK(says(0).empty());
  CHECK(says(2) == "attn::call: expected x with memory behind its extents; found a null view of shape [1, 3, 2, 4]");
}

TEST_CASE("what a call writes overlaps no view named before or after, and each says which", "[check]") {
  std::vector<float> memory(64);
  const auto view = [&](idx_t first, idx_t rows = 4) {
    return tensor_view<float>(memory.data() + first, {1, 1, rows, 4});
  };
  using attn::detail::or_one;
  const tensor_view<float> x = view(0), y = view(16), none;
  const auto says = [&](const auto& more) {
    return refusal([&] {
      attn::detail::call_views views("call");
      views.read("x", x);
      views.write("out", y);
      more(views);
    });
  };
  const std::string begin = "attn::call: expected ", overlap = " in separate memory; found an overlap";
  CHECK(says([&](auto& v) { v.read("x again", x), v.option("none", none), v.write("more", view(32)); }).empty());
  CHECK(says([&](auto& v) { v.read("k", view(28)); }) == begin + "out and k" + overlap);
  CHECK(says([&](auto& v) { v.write("lse", view(12)); }) == begin + "lse and x" + overlap);
  CHECK(says([&](auto& v) { v.write("lse", view(20)); }) == begin + "out and lse" + overlap);
  CHECK(says([&](auto& v) { v.update("the state", view(20)); }) == begin + "the state and out" + overlap);
  CHECK(says([&](auto& v) { v.gradient("x", x, x); }) == begin + "the gradient of x and x" + overlap);
  CHECK(says([&](auto& v) { v.gradient("x", view(32), none); }) ==
        begin + "x, since its gradient is asked for; found none");
  CHECK(says([&](auto& v) { v.gradient("w", view(32, 3), x, "the weight"); }) ==
        begin + "the gradient of the weight of the shape of the weight [1, 1, 4, 4]; found [1, 1, 3, 4]");
  CHECK(says([&](auto& v) { v.gradient("x", none, none); }).empty());
  CHECK(says([&](auto& v) { v.read("k", view(32), {{"batch", 5, or_one}, {}, {"length", 4}}); }).empty());
  CHECK(says([&](auto& v) { v.read("k", view(32), {{"batch", 5}}); }) == begin + "batch 5; found 1");
  CHECK(says([&](auto& v) { v.read("k", view(32), {{}, {}, {"length", 5, or_one}}); }) ==
        begin + "length 1 or 5; found 4");
}

}  // namespace testing::check_tests
