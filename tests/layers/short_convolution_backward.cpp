// short_convolution_backward against the reverse pass of its reference.
#include "layers/short_convolution.hpp"

namespace testing::short_convolution_backward_tests {
namespace {

template <class S>
void check(const short_convolution_problem& p) {
  check_layer_backward<S>({case_of(p), [p](const auto& in, const auto& d_both, const auto& to, bool accumulate,
                                           attn::execution& exec) {
                             short_convolution_gradients_of<S>(p, in, d_both, to, accumulate, exec);
                           }});
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("short_convolution_backward: against the reverse pass", "[short_convolution_backward]",
                        all_types) {
  for (idx_t width : {1, 2, 4, 7})
    for (idx_t length : {0, 1, 3, 66, 130}) {
      auto p = random_short_convolution(1 + length % 3, length, length == 66 ? 16 : 5, width);
      if (length % 2 == 0 || width == 4) p.activation = attn::activation::silu;
      if (width == 2) p.bias = {}, p.initial_state = {};
      check<TestType>(p);
    }
  auto p = random_short_convolution(2, 9, 5, 40);
  p.activation = attn::activation::gelu_tanh;
  check<TestType>(p);
  check<TestType>(random_short_convolution(2, 9, 0, 3));
}

TEMPLATE_LIST_TEST_CASE("short_convolution_backward: lengths, with anything in the padding",
                        "[short_convolution_backward]", all_types) {
  using S = TestType;
  auto p = random_short_convolution(4, 70, 5, 4);
  p.activation = attn::activation::silu;
  p.lengths = {70, 0, 2, 65};
  check<S>(p);
  p = rounded<S>(p);
  const gradient_case c = case_of(p);
  std::vector<tensor<S>> in;
  for (const auto& x : c.inputs) in.push_back(cast<S>(x));
  tensor<S> d_both = cast<S>(random_sequence(9, 4, 73, 5));
  const auto gradients = [&] {
    auto all = in;
    std::vector<tensor<S>*> to;
    for (auto& g : all) std::fill(g.data.begin(), g.data.end(), S(7)), to.push_back(&g);
    attn::execution serial;
    short_convolution_gradients_of<S>(p, in, d_both, to, false, serial);
    return all;
  };
  const auto clean = gradients();
  for (idx_t b = 0; b < 4; ++b)
    for (idx_t t = p.lengths[static_cast<std::size_t>(b)]; t < 70; ++t)
      for (idx_t e = 0; e < 5; ++e) in[0](b, 0, t, e) = d_both(b, 0, t, e) = std::numeric_limits<S>::quiet_NaN();
  CHECK(gradients() == clean);
}

TEST_CASE("short_convolution_backward: the reverse pass against central differences", "[short_convolution_backward]") {
  auto p = random_short_convolution(2, 6, 3, 4);
  p.activation = attn::activation::silu;
  check_central_differences(case_of(p));
}

// Sums over so many equal terms err by no more than those of a segment.
TEST_CASE("short_convolution_backward: long sequences", "[short_convolution_backward]") {
  constexpr idx_t length = 262144;
  const tensor<float> x(1, 1, length, 1, 0.7f), weight(1, 1, 1, 3, 1), bias(1, 1, 1, 1);
  tensor<float> d_weight = weight, d_bias = bias;
  attn::execution serial;
  attn::short_convolution_gradients<float> g;
  g.weight = matrix_or_none(&d_weight), g.bias = vector_or_none(&d_bias);
  compiled_layers<float>::short_convolution_backward(sequence(x), {.weight = matrix(weight), .bias = vector(bias)},
                                                     sequence(x), g, {}, serial);
  CHECK(std::abs(d_bias(0, 0, 0, 0) / (0.7f * length) - 1) <= 4e-6f);
  CHECK(std::abs(d_weight(0, 0, 0, 2) / (0.49f * length) - 1) <= 4e-6f);  // the tap of the token itself
}

}  // namespace testing::short_convolution_backward_tests
