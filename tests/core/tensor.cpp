// A tensor owns what its views see.
#include <attn/core/tensor.hpp>

#include <limits>
#include <utility>

#include "support/catch.hpp"
#include "support/refusal.hpp"
#include "support/tensor.hpp"

namespace testing::tensor_tests {

TEST_CASE("a tensor is contiguous, the last axis fastest, and filled", "[tensor]") {
  attn::tensor<float, 3> x({2, 3, 4}, 1.5f);
  CHECK(x.size() == 24);
  CHECK(x.extents() == std::array<idx_t, 3>{2, 3, 4});
  CHECK(x.view().strides() == std::array<idx_t, 3>{12, 4, 1});
  CHECK(x(1, 2, 3) == 1.5f);
  x(1, 0, 2) = 7;
  CHECK(x.data()[14] == 7);
  CHECK(std::as_const(x)(1, 0, 2) == 7);
  CHECK(attn::tensor<double>().size() == 0);
  CHECK(attn::tensor<double, 2>({3, 0}).size() == 0);
}

TEST_CASE("a tensor is a view wherever one is taken, const where it is const", "[tensor]") {
  attn::tensor<float> x({1, 2, 3, 4});
  const attn::tensor_view<float> view = x;
  const attn::tensor_view<const float> constant = std::as_const(x);
  CHECK(view.data() == x.data());
  CHECK(constant.data() == x.data());
  CHECK(attn::as_view(x).extents() == x.extents());
  STATIC_REQUIRE(std::is_same_v<decltype(attn::as_view(x)), attn::tensor_view<float>>);
  STATIC_REQUIRE(std::is_same_v<decltype(attn::as_view(std::as_const(x))), attn::tensor_view<const float>>);
  STATIC_REQUIRE_FALSE(std::is_convertible_v<const attn::tensor<float>&, attn::tensor_view<float>>);
}

TEST_CASE("a copy of a tensor owns its own memory", "[tensor]") {
  attn::tensor<float, 1> x(std::array<idx_t, 1>{3}, 2);
  const attn::tensor<float, 1> copy = x;
  x(0) = 5;
  CHECK(copy(0) == 2);
}

TEST_CASE("a tensor refuses extents that are negative or that no memory can hold", "[tensor]") {
  CHECK(well_formed(refusal([] { attn::tensor<float, 2>({2, -1}); }), "tensor"));
  CHECK(well_formed(refusal([] { attn::tensor<float, 2>({std::numeric_limits<idx_t>::max(), 2}); }), "tensor"));
}

}  // namespace testing::tensor_tests
