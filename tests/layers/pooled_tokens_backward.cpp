// pooled_tokens_backward against the reverse pass of its reference.
#include "layers/pooled_tokens.hpp"

namespace testing::pooled_tokens_backward_tests {
namespace {

template <class S>
void check(const pooled_tokens_problem& p) {
  check_layer_backward<S>({case_of(p), [p](const auto& in, const auto& d_out, const auto& to, bool accumulate,
                                           attn::execution& exec) {
                             pooled_tokens_gradients_of<S>(p, in, d_out, to, accumulate, exec);
                           }});
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("pooled_tokens_backward: against the reverse pass", "[pooled_tokens_backward]", all_types) {
  for (idx_t window : {2, 5, 9})
    for (bool overlap : {false, true})
      for (int given : {0, 2, 3}) check<TestType>(random_pooled_tokens({2, 2, 30, 6}, window, overlap, given));
  check<TestType>(random_pooled_tokens({1, 2, 150, 16}, 4, true));  // several tasks of a head
  for (idx_t length : {0, 3}) check<TestType>(random_pooled_tokens({2, 1, length, 4}, 4, true));
}

TEMPLATE_LIST_TEST_CASE("pooled_tokens_backward: lengths, with anything in the padding", "[pooled_tokens_backward]",
                        all_types) {
  using S = TestType;
  auto p = random_pooled_tokens({4, 2, 21, 6}, 4, true);
  p.options.lengths = {21, 0, 3, 14};
  check<S>(p);
  p = rounded<S>(p);
  const gradient_case c = case_of(p);
  std::vector<tensor<S>> in;
  for (const auto& x : c.inputs) in.push_back(cast<S>(x));
  tensor<S> d_out = cast<S>(random_normal(9, 4, 2, 5, 3));
  const auto gradients = [&] {
    auto all = in;
    std::vector<tensor<S>*> to;
    for (auto& g : all) std::fill(g.data.begin(), g.data.end(), S(7)), to.push_back(&g);
    attn::execution serial;
    pooled_tokens_gradients_of<S>(p, in, d_out, to, false, serial);
    return all;
  };
  const auto clean = gradients();
  const S nan = std::numeric_limits<S>::quiet_NaN();
  for (idx_t b = 0; b < 4; ++b)
    for (idx_t h = 0; h < 2; ++h) {
      const idx_t windows = p.options.lengths[static_cast<std::size_t>(b)] / 4;
      for (idx_t t = windows * 4; t < 21; ++t)
        for (idx_t e = 0; e < 6; ++e) in[0](b, h, t, e) = in[1](b, h, t, e) = nan;
      for (idx_t w = windows; w < 5; ++w)
        for (idx_t e = 0; e < 3; ++e) d_out(b, h, w, e) = nan;
    }
  CHECK(gradients() == clean);
}

TEST_CASE("pooled_tokens_backward: the reverse pass against central differences", "[pooled_tokens_backward]") {
  check_central_differences(case_of(random_pooled_tokens({1, 2, 13, 4}, 3, true)));
}

TEST_CASE("pooled_tokens_backward: tokens that are not seen", "[pooled_tokens_backward]") {
  auto p = random_pooled_tokens({1, 1, 8, 2}, 4, false, 1);
  for (idx_t t = 0; t < 8; ++t) p.logits(0, 0, t, 0) = -std::numeric_limits<double>::infinity();
  for (idx_t t = 0; t < 8; ++t) p.x(0, 0, t, 0) = std::numeric_limits<double>::quiet_NaN();
  const std::vector<tensor<float>> in = {cast<float>(p.x), cast<float>(p.logits)};
  auto all = in;
  attn::execution serial;
  pooled_tokens_gradients_of<float>(p, in, tensor<float>(1, 1, 2, 2, 1.0f), {&all[0], &all[1]}, false, serial);
  for (idx_t t = 0; t < 8; ++t) CHECK((all[0](0, 0, t, 0) == 0 && all[1](0, 0, t, 0) == 0));
}

TEST_CASE("pooled_tokens_backward refuses what does not fit", "[pooled_tokens_backward]") {
  const tensor<float> x(2, 2, 9, 8), d(2, 2, 2, 4);
  tensor<float> dx = x;
  const auto refused = [&](const attn::tensor_view<const float>& d_out, const attn::pooled_tokens_gradients<float>& g,
                           idx_t channels = 8) {
    const std::string text = refusal([&] {
      attn::pooled_tokens_backward(view(x).slice(3, 0, channels), d_out, g, {.window = 4, .overlap = true});
    });
    CHECK(well_formed(text, "pooled_tokens_backward"));
    return text.substr(text.find("expected"));
  };
  CHECK(refused(view(d), {.logits = view(dx)}) == "expected logits, since its gradient is asked for; found none");
  CHECK(refused(view(d).slice(2, 0, 1), {.x = view(dx)}) == "expected d_out length = complete windows of x 2; found 1");
  CHECK(refused(view(d), {.x = view(dx).slice(2, 0, 8)}).starts_with(
      "expected the gradient of x of the shape of x"));
  CHECK(refused(view(d), {}, 7) == "expected an even number of channels of x, where windows overlap; found 7");
}

}  // namespace testing::pooled_tokens_backward_tests
