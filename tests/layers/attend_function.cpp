// Operators as values, and features that are kept for each head dim.
#include "layers/layers.hpp"

#include <attn/layers/attend_function.hpp>
#include <attn/layers/kept_features.hpp>

#include <thread>

namespace testing::attend_function_tests {

TEST_CASE("attend_function: what it is made of is what is called", "[attend_function]") {
  const tensor<float> x = cast<float>(random_sequence(1, 2, 9, 8)), w = cast<float>(random_weight(2, 8, 8));
  const attn::multi_head_weights<float> weights{.query = matrix(w), .key = matrix(w), .value = matrix(w)};
  tensor<float> direct(2, 1, 9, 8), stored = direct;
  const auto first_values = [calls = 0](auto, auto, auto v, auto out, auto&) mutable {
    ++calls;
    for (idx_t b = 0; b < out.extent(0); ++b)
      for (idx_t h = 0; h < out.extent(1); ++h)
        for (idx_t i = 0; i < out.extent(2); ++i)
          for (idx_t d = 0; d < out.extent(3); ++d) out(b, h, i, d) = v(b, h, i / 2, d) + static_cast<float>(calls);
  };
  auto in_place = first_values;
  attn::attend_function<float> attend = [](auto, auto, auto, auto, attn::execution&) { FAIL("the operator before"); };
  attend = first_values;
  for (int call = 0; call < 2; ++call) {  // callables that change
    attn::multi_head(sequence(x), sequence(direct), weights, in_place, {.heads = 2});
    attn::multi_head(sequence(x), sequence(stored), weights, attend, {.heads = 2});
    CHECK(direct == stored);
  }
  attend = nullptr;
  CHECK_THROWS_AS(attn::multi_head(sequence(x), sequence(stored), weights, attend, {.heads = 2}),
                  std::bad_function_call);
}

TEST_CASE("mix_function: in the place of a mixer", "[attend_function]") {
  const tensor<float> x = cast<float>(random_sequence(1, 1, 9, 8));
  const feed_forward_store<float> feed(random_feed_forward(8, 20, 8));
  tensor<float> direct = x, stored = x;
  const auto turn = [](auto from, auto to, attn::execution&) {
    for (idx_t i = 0; i < to.extent(1); ++i)
      for (idx_t d = 0; d < to.extent(2); ++d) to(0, i, d) = from(0, to.extent(1) - 1 - i, d);
  };
  const attn::mix_function<float> mix = turn;
  attn::encoder_block(sequence(std::as_const(x)), sequence(direct), {.feed_forward = feed.views()}, turn);
  attn::encoder_block(sequence(std::as_const(x)), sequence(stored), {.feed_forward = feed.views()}, mix);
  CHECK(direct == stored);
}

TEST_CASE("kept_features: those of draw_features, for every dim, whatever was drawn before", "[attend_function]") {
  const attn::kept_features<float> features(32, {.seed = 7}), same = features;
  const auto drawn = [](idx_t dim) { return attn::draw_features<float>(32, dim, {.seed = 7}); };
  const auto equal = [&](const attn::tensor_view<const float, 3>& kept, idx_t dim) {
    const auto wanted = drawn(dim);
    return kept.extents() == wanted.extents() && std::equal(kept.data(), kept.data() + kept.size(), wanted.data());
  };
  const auto first = features.of(64);
  CHECK(equal(first, 64));
  CHECK(equal(features.of(16), 16));
  CHECK(features.of(64).data() == first.data());
  CHECK(same.of(64).data() == first.data());
  const tensor<float> q(1, 2, 3, 16);
  CHECK(features.of(view(q)).data() == features.of(16).data());
  CHECK_THROWS_AS(features.of(0), std::invalid_argument);
  CHECK(equal(features.of(24), 24));  // and it is sound
}

TEST_CASE("kept_features: threads", "[attend_function]") {
  const attn::kept_features<float> features(16, {.seed = 3});
  std::vector<const float*> found(4);
  std::vector<std::thread> threads;
  for (std::size_t n = 0; n < found.size(); ++n)
    threads.emplace_back([&features, &at = found[n]] { at = features.of(32).data(); });
  for (auto& thread : threads) thread.join();
  for (const float* data : found) CHECK(data == found[0]);
}

}  // namespace testing::attend_function_tests
