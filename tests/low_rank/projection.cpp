// Drawn projections: the distribution, and that a seed means the same numbers everywhere.
#include <attn/low_rank/draw_projection.hpp>

#include <cmath>

#include "support/catch.hpp"
#include "support/refusal.hpp"

namespace testing::projection_tests {

TEST_CASE("draw_projection: normal with variance 1 / rank", "[projection]") {
  const auto e = attn::draw_projection<double>(64, 2000, {.seed = 5, .heads = 2});
  const auto x = e.view();
  const double count = static_cast<double>(x.size());
  double mean = 0, square = 0, fourth = 0;
  for (attn::idx_t n = 0; n < x.size(); ++n) {
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
  for (attn::idx_t r = 0; r < 16; ++r)
    for (attn::idx_t j = 0; j < 30; ++j) {
      differ += a.view()(0, r, j) != d.view()(0, r, j) || a.view()(1, r, j) != d.view()(1, r, j);
      differ += a.view()(0, r, j) != b.view()(0, r, j);  // the longer one begins with the shorter
      others += a.view()(0, r, j) == c.view()(0, r, j);
      others += a.view()(0, r, j) == a.view()(1, r, j);
    }
  CHECK(a.view().extents() == std::array<attn::idx_t, 3>{2, 16, 30});
  CHECK(differ == 0);
  CHECK(others == 0);
}

TEST_CASE("draw_projection: the tensor converts to the view an operator takes", "[projection]") {
  const attn::tensor<float, 3> e = attn::draw_projection<float>(3, 4, {.heads = 2});
  const attn::tensor_view<const float, 3> view = e;
  CHECK(view.data() == e.data());
  CHECK(view.extents() == std::array<attn::idx_t, 3>{2, 3, 4});
}

TEST_CASE("draw_projection: bits that no compiler changes", "[projection]") {
  const auto e = attn::draw_projection<double>(3, 4, {.seed = 7});
  CHECK(e.view()(0, 0, 0) == 0x1.57af406d2d3efp-4);
  CHECK(e.view()(0, 2, 3) == -0x1.a15bdd8124d57p-2);
}

TEST_CASE("draw_projection refuses what does not fit", "[projection]") {
  const auto check = [](const char* says, auto&& call) {
    const std::string message = refusal(call);
    INFO(message);
    CHECK(well_formed(message, "draw_projection"));
    CHECK(message.find(says) != std::string::npos);
  };
  check("rank >= 1; found 0", [] { attn::draw_projection<float>(0, 10); });
  check("rank >= 1; found -3", [] { attn::draw_projection<float>(-3, 10); });
  check("length >= 0; found -1", [] { attn::draw_projection<float>(4, -1); });
  check("heads >= 1; found 0", [] { attn::draw_projection<float>(4, 10, {.heads = 0}); });
  check("that memory can hold", [] { attn::draw_projection<float>(attn::idx_t(1) << 40, attn::idx_t(1) << 40); });
  CHECK(attn::draw_projection<float>(4, 0).view().empty());
}

}  // namespace testing::projection_tests
