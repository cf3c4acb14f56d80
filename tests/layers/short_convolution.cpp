// short_convolution against its reference, and its state fed step by step.
#include "layers/short_convolution.hpp"

namespace testing::short_convolution_tests {
namespace {

template <class S>
void check(const short_convolution_problem& given) {
  const short_convolution_problem p = rounded<S>(given);
  INFO(case_of(p).name);
  const auto wanted = p.by_reference();
  short_convolution_memory<S> m(p);
  attn::execution serial, threads(3, 0);
  m.run(serial);
  CHECK(relative_error(m.out, wanted.out) <= tolerance<S>::out);
  CHECK(m.final_state == cast<S>(wanted.final_state));
  short_convolution_memory<S> again(p);
  again.run(threads);
  CHECK(again.out == m.out);
}

// Feeds all tokens in pieces, item b lengths[b] of each.
template <class S>
tensor<S> fed(attn::short_convolution_state<S>& state, short_convolution_memory<S>& m, std::vector<idx_t> pieces) {
  attn::execution serial;
  tensor<S> out = m.out;
  idx_t at = 0;
  for (idx_t n : pieces) {
    compiled_layers<S>::short_convolution_step(state, sequence(std::as_const(m.x)).slice(1, at, n),
                                               sequence(out).slice(1, at, n), m.weights(),
                                               {.activation = m.activation}, serial);
    at += n;
  }
  return out;
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("short_convolution: against its reference", "[short_convolution]", all_types) {
  for (idx_t width : {1, 2, 4, 7})
    for (idx_t channels : {1, 16, 33})
      for (idx_t length : {0, 1, 3, 66, 130}) {
        auto p = random_short_convolution(1 + length % 3, length, channels, width);
        if (length % 2 == 0) p.activation = attn::activation::silu;
        if (channels == 1) p.bias = {};
        if (length == 130) p.initial_state = {};
        check<TestType>(p);
      }
  auto p = random_short_convolution(2, 9, 5, 40);  // wider than the sequence is long
  p.activation = attn::activation::gelu;
  check<TestType>(p);
  check<TestType>(random_short_convolution(2, 9, 0, 3));
  check<TestType>(random_short_convolution(0, 9, 4, 3));
}

TEST_CASE("short_convolution: weights that times log2 e are infinite", "[short_convolution]") {
  const std::vector<float> x = {0, 1e-30f, 1}, bias = {0};
  const float w = 3e38f;
  std::vector<float> out(3, 7);
  attn::execution serial;
  compiled_layers<float>::short_convolution({x.data(), {1, 3, 1}}, {out.data(), {1, 3, 1}},
                                            {.weight = {&w, {1, 1}}, .bias = {bias.data(), {1}}},
                                            {.activation = attn::activation::silu}, serial);
  CHECK(out[0] == 0);
  CHECK(std::abs(out[1] / 3e8f - 1) <= 1e-6f);
  CHECK(out[2] == w);
}

TEMPLATE_LIST_TEST_CASE("short_convolution: lengths, with anything in the padding", "[short_convolution]", all_types) {
  for (idx_t channels : {5, 16}) {
    auto p = random_short_convolution(4, 70, channels, 4);
    p.activation = attn::activation::silu;
    p.lengths = {70, 0, 2, 65};
    check<TestType>(p);
    short_convolution_memory<TestType> clean(rounded<TestType>(p)), bad = clean;
    for (idx_t b = 0; b < 4; ++b)
      for (idx_t t = p.lengths[static_cast<std::size_t>(b)]; t < 70; ++t)
        for (idx_t c = 0; c < channels; ++c) bad.x(b, 0, t, c) = std::numeric_limits<TestType>::quiet_NaN();
    attn::execution serial;
    clean.run(serial), bad.run(serial);
    CHECK(bad.out == clean.out);
    CHECK(bad.final_state == clean.final_state);
  }
}

TEMPLATE_LIST_TEST_CASE("short_convolution_state: steps and chunks give the bits of one call", "[short_convolution]",
                        all_types) {
  using S = TestType;
  for (idx_t width : {1, 2, 4, 9}) {
    auto p = random_short_convolution(3, 24, 17, width);
    p.initial_state = {};
    p.activation = attn::activation::silu;
    short_convolution_memory<S> m(rounded<S>(p));
    attn::execution serial;
    m.run(serial);
    attn::short_convolution_state<S> state({.batch = 3, .channels = 17, .width = width});
    CHECK(state.bytes() == static_cast<std::size_t>(3 * 17 * (width - 1)) * sizeof(S));
    CHECK(fed(state, m, {1, 1, 2, 0, 13, 1, 6}) == m.out);
    CHECK(state.tokens() == 24);
    for (idx_t b = 0; b < 3; ++b)
      for (idx_t e = 0; e < width - 1; ++e)
        for (idx_t c = 0; c < 17; ++c) CHECK(state.value(b, e, c) == m.final_state(b, 0, e, c));
    state.reset();
    CHECK(fed(state, m, {24}) == m.out);
  }
}

TEST_CASE("short_convolution_state: items, lengths, append", "[short_convolution]") {
  auto p = random_short_convolution(2, 12, 8, 4);
  p.initial_state = {};
  short_convolution_memory<float> m(p);
  attn::execution serial;
  m.run(serial);
  attn::short_convolution_state<float> state({.batch = 2, .channels = 8, .width = 4});
  const auto x = sequence(std::as_const(m.x));
  const std::vector<idx_t> uneven = {5, 2};
  tensor<float> out = m.out;
  const auto step = [&](idx_t at, idx_t n) {
    compiled_layers<float>::short_convolution_step(state, x.slice(1, at, n), sequence(out).slice(1, at, n),
                                                   m.weights(), {}, serial);
  };
  compiled_layers<float>::short_convolution_step(state, x.slice(1, 0, 5), sequence(out).slice(1, 0, 5), m.weights(),
                                                 {.lengths = uneven}, serial);
  CHECK(state.tokens(0) == 5);
  CHECK(state.tokens(1) == 2);
  for (idx_t c = 0; c < 8; ++c) {
    CHECK(out(0, 0, 4, c) == m.out(0, 0, 4, c));
    CHECK(out(1, 0, 1, c) == m.out(1, 0, 1, c));
    CHECK(out(1, 0, 2, c) == 0);
    CHECK(state.value(1, 0, c) == 0);  // older than the sequence
    CHECK(state.value(1, 2, c) == m.x(1, 0, 1, c));
  }
  state.append(x.slice(1, 5, 2), {.lengths = std::vector<idx_t>{2, 0}});
  const auto branch = state;
  state.reset(1);
  state.copy_item(0, 1);
  state.reorder(std::vector<idx_t>{1, 0});
  CHECK(state.tokens(1) == 7);
  step(7, 5);
  for (idx_t i = 7; i < 12; ++i)
    for (idx_t c = 0; c < 8; ++c) CHECK(out(0, 0, i, c) == m.out(0, 0, i, c));
  CHECK(branch.tokens(1) == 2);
  CHECK(branch.value(1, 2, 3) == m.x(1, 0, 1, 3));
}

}  // namespace testing::short_convolution_tests
