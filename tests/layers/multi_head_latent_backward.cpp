// multi_head_latent_backward against the reverse pass of the reference.
#include "layers/multi_head_latent.hpp"
#include "support/pairwise.hpp"

namespace testing::multi_head_latent_backward_tests {
namespace {

// Projections, norms, scores and output in a row, each of which rounds what it gives.
template <class S>
constexpr double factor = sizeof(S) == 2 ? 16 : 4;

}  // namespace

TEMPLATE_LIST_TEST_CASE("multi_head_latent_backward: options", "[multi_head_latent_backward]", all_types) {
  std::vector<std::array<int, 6>> all;
  for (int bits = 0; bits < 64; ++bits)
    all.push_back({bits & 1, bits >> 1 & 1, bits >> 2 & 1, bits >> 3 & 1, bits >> 4 & 1, bits >> 5 & 1});
  for (const auto& bits : selected(all, [](const auto& c) { return c; }, true)) {
    auto p = random_latent_layer({.low_rank = bits[0] == 1, .norms = bits[1] == 1, .output = bits[2] == 1,
                                  .rotated = bits[3] == 1, .causal = bits[4] == 1});
    p.attended = bits[5] == 1;
    check_layer_backward(case_of<TestType>(p), factor<TestType>);
  }
}

TEMPLATE_LIST_TEST_CASE("multi_head_latent_backward: lengths and widths", "[multi_head_latent_backward]", all_types) {
  for (idx_t length : {0, 1, 65})
    for (idx_t shared : {0, 8})
      check_layer_backward(case_of<TestType>(random_latent_layer({.length = length, .heads = 2, .key = 3, .value = 2,
                                                                  .shared = shared, .rank = 16,
                                                                  .rotated = shared > 0})),
                           factor<TestType>);
}

// What lies in padding, NaN too, has no gradient and reaches none.
TEMPLATE_LIST_TEST_CASE("multi_head_latent_backward: padding", "[multi_head_latent_backward]", all_types) {
  using S = TestType;
  auto p = random_latent_layer({});
  p.lengths = {13, 21};
  const auto c = case_of<S>(p);
  check_layer_backward(c, factor<S>);
  std::vector<tensor<S>> inputs;
  for (const auto& x : p.inputs) inputs.push_back(cast<S>(x));
  tensor<S> d_out = cast<S>(random_sequence(70, 2, 21, 8));
  for (idx_t i = 13; i < 21; ++i)
    for (idx_t d = 0; d < 8; ++d) d_out(0, 0, i, d) = S(0);
  attn::execution serial;
  const auto clean = all_gradients(c, inputs, d_out, serial);
  for (idx_t i = 13; i < 21; ++i)
    for (idx_t d = 0; d < 10; ++d) {
      CHECK(clean[0](0, 0, i, d) == S(0));
      inputs[0](0, 0, i, d) = std::numeric_limits<S>::quiet_NaN();
    }
  for (idx_t i = 13; i < 21; ++i)
    for (idx_t d = 0; d < 8; ++d) d_out(0, 0, i, d) = std::numeric_limits<S>::quiet_NaN();
  CHECK(all_gradients(c, inputs, d_out, serial) == clean);
}

TEST_CASE("multi_head_latent_backward: the reverse pass against central differences", "[multi_head_latent_backward]") {
  check_central_differences(case_of<float>(random_latent_layer({.length = 6})).reference);
  const latent_layer_case alone{.length = 5, .low_rank = false, .output = false};
  check_central_differences(case_of<float>(random_latent_layer(alone)).reference);
}

}  // namespace testing::multi_head_latent_backward_tests
