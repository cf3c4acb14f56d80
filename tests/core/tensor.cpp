// A tensor owns what its views see.
#include <attn/core/index_view.hpp>
#include <attn/core/tensor.hpp>
#include <attn/softmax/full_softmax.hpp>

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

TEST_CASE("a tensor is taken wherever a view or a list is", "[tensor]") {
  attn::tensor<float, 3> sequence({2, 5, 6});
  CHECK(attn::split_heads(sequence, 3)(1, 2, 4, 1) == 0);
  CHECK(&attn::split_heads(sequence, 3)(1, 2, 4, 1) == &sequence(1, 4, 5));
  CHECK(attn::split_heads(std::as_const(sequence), 2).extents() == std::array<idx_t, 4>{2, 2, 5, 3});
  CHECK(refusal([&] { attn::split_heads(sequence, 4); }).find("heads that divide the columns 6") < 99);

  attn::tensor<float> bias({1, 1, 4, 5});
  attn::tensor<float, 3> rows({1, 2, 4});
  attn::tensor<float, 2> by_distance({2, 3});
  attn::tensor<float, 1> per_head(std::array<idx_t, 1>{2}, 1);
  attn::tensor<idx_t, 1> lengths(std::array<idx_t, 1>{2}, 3);
  attn::tensor<std::uint8_t> mask({1, 1, 4, 5}, 1);
  attn::tensor<bool, 2> key_mask({2, 5}, true);
  const attn::full_softmax_options<float> options{.lengths = lengths, .bias = bias, .relative_keys = rows,
                                                  .relative_bias = by_distance, .log_decay = rows, .mask = mask,
                                                  .key_mask = key_mask, .alibi_slopes = per_head, .sinks = per_head,
                                                  .lse = rows};
  CHECK(options.lengths.data() == lengths.data());
  CHECK(options.bias.data() == bias.data());
  CHECK(options.relative_bias.data() == by_distance.data());
  CHECK(options.lse.data() == rows.data());
  CHECK(options.mask.bytes().extents() == std::array<idx_t, 4>{1, 1, 4, 5});
  CHECK(options.mask.bytes().data() == mask.data());
  CHECK(options.key_mask.bytes().extents() == std::array<idx_t, 4>{2, 1, 1, 5});
  CHECK(options.key_mask.bytes()(1, 0, 0, 4) == 1);
  CHECK(options.alibi_slopes.size() == 2);
  CHECK(options.sinks[1] == 1);
  attn::tensor<std::int32_t> indices({1, 2, 4, 3});
  CHECK(attn::index_view(indices).extent(3) == 3);
}

TEST_CASE("the key mask of one item may be a list", "[tensor]") {
  const std::vector<std::uint8_t> bytes = {1, 0, 1};
  const bool flags[] = {true, false};
  const attn::tensor<bool, 1> owned(std::array<idx_t, 1>{4}, true);
  CHECK(attn::key_mask_view(bytes).bytes().extents() == std::array<idx_t, 4>{1, 1, 1, 3});
  CHECK(attn::key_mask_view(bytes).bytes()(0, 0, 0, 2) == 1);
  CHECK(attn::key_mask_view(flags).bytes()(0, 0, 0, 1) == 0);
  CHECK(attn::key_mask_view(owned).bytes().extent(3) == 4);
  const attn::tensor_view<const std::uint8_t, 1> every_second(bytes.data(), {2}, {2});
  CHECK(attn::key_mask_view(every_second).bytes()(0, 0, 0, 1) == 1);
}

TEST_CASE("a list has stride 1", "[tensor]") {
  const Eigen::VectorXf slopes = Eigen::VectorXf::Ones(4);
  CHECK(attn::list_view<float>(slopes).size() == 4);
  const attn::tensor_view<const float, 1> every_second(slopes.data(), {2}, {2});
  CHECK(refusal([&] { attn::list_view<float> list(every_second); }) ==
        "attn: expected a list with stride 1; found stride 2");
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
