// Drawn projections: the distribution, and that a seed means the same numbers everywhere.
#include <attn/low_rank/draw_projection.hpp>

#include <cmath>

#include "support/catch.hpp"
#include "support/refusal.hpp"

namespace testing {

TEST_CASE("draw_projection: normal with variance 1 / rank", "[projection]") {
  const auto e = attn::draw_projection<double>(64, 2000, {.seed = 5, .heads = 2});
  const auto x = e.view();
  const double count = static_cast<double>(x.size());
  double mean = 0, square = 0, fourth = 0;
  for (attn::index n = 0; n < x.size(); ++n) {
    const double z = x.data()[n] * 8;
    mean += z / count, square += z * z / count, fourth += z * z * z * z / count;
  }
  // four standard deviations of each estimate
  CHECK(std::abs(mean) <= 4 / std::sqrt(count));
  CHECK(std::abs(square - 1) <= 4 * std::sqrt(2 / count));
  CHECK(std::abs(fourth - 3) <= 4 * std::sqrt(96 / count));
}

TEST_CASE("draw_projection: same seed, same numbers; another seed or head, others", "[projection]") {
  const auto a = attn::draw_projection<float>(16, 30, {.seed = 1, .heads = 2});
  const auto b = attn::draw_projection<float>(16, 50, {.seed = 1});
  const auto c = attn::draw_projection<float>(16, 30, {.seed = 2});
  const auto d = attn::draw_projection<float>(16, 30, {.seed = 1, .heads = 2});
  int differ = 0, others = 0;
  for (attn::index r = 0; r < 16; ++r)
    for (attn::index j = 0; j < 30; ++j) {
      differ += a.view()(0, r, j) != d.view()(0, r, j) || a.view()(1, r, j) != d.view()(1, r, j);
      differ += a.view()(0, r, j) != b.view()(0, r, j);  // the longer one begins with the shorter
      others += a.view()(0, r, j) == c.view()(0, r, j);
      others += a.view()(0, r, j) == a.view()(1, r, j);
    }
  CHECK(a.view().extents() == std::array<attn::index, 3>{2, 16, 30});
  CHECK(differ == 0);
  CHECK(others == 0);
}

TEST_CASE("draw_projection: bits that no compiler changes", "[projection]") {
  const auto e = attn::draw_projection<double>(3, 4, {.seed = 7});
  CHECK(e.view()(0, 0, 0) == 0x1.57af406d2d3efp-4);
  CHECK(e.view()(0, 2, 3) == -0x1.a15bdd8124d57p-2);
}

TEST_CASE("draw_projection refuses what does not fit", "[projection]") {
  const auto check = [](auto&& call) { CHECK(well_formed(refusal(call), "projection")); };
  check([] { attn::draw_projection<float>(0, 10); });
  check([] { attn::draw_projection<float>(-3, 10); });
  check([] { attn::draw_projection<float>(4, -1); });
  check([] { attn::draw_projection<float>(4, 10, {.heads = 0}); });
  check([] { attn::draw_projection<float>(attn::index(1) << 40, attn::index(1) << 40); });
  CHECK(attn::draw_projection<float>(4, 0).view().empty());
}

}  // namespace testing
