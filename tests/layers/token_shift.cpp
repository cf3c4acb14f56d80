// token_shift and its backward pass against their reference, and its state fed step by step.
#include "layers/token_shift.hpp"

namespace testing::token_shift_tests {
namespace {

template <class S>
void check(const token_shift_problem& given) {
  const token_shift_problem p = rounded<S>(given);
  INFO(case_of<S>(p).reference.name);
  const auto wanted = p.by_reference();
  token_shift_memory<S> m(p), again = m;
  attn::execution serial, threads(3, 0);
  m.run(serial), again.run(threads);
  CHECK(relative_error(m.out, wanted.out) <= tolerance<S>::out);
  CHECK(m.final_state == cast<S>(wanted.final_state));
  CHECK(again.out == m.out);
}

// Feeds all tokens in pieces.
template <class S>
tensor<S> fed(attn::token_shift_state<S>& state, token_shift_memory<S>& m, std::vector<idx_t> pieces) {
  attn::execution serial;
  tensor<S> out = m.out;
  idx_t at = 0;
  for (idx_t n : pieces) {
    compiled_layers<S>::token_shift_step(state, sequence(std::as_const(m.x)).slice(1, at, n),
                                         sequence(out).slice(1, at, n), m.weights(), {}, serial);
    at += n;
  }
  return out;
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("token_shift: against its reference", "[token_shift]", all_types) {
  for (idx_t channels : {0, 1, 16, 33})
    for (idx_t length : {0, 1, 3, 66, 130}) {
      auto p = random_token_shift(1 + length % 3, length, channels);
      if (length == 130) p.initial_state = {};
      check<TestType>(p);
      p.mix = {};
      check<TestType>(p);
    }
  check<TestType>(random_token_shift(0, 9, 4));
}

TEST_CASE("token_shift: mix 1, and none, give the token before to the last bit", "[token_shift]") {
  auto p = rounded<float>(random_token_shift(2, 70, 17));
  attn::execution serial;
  token_shift_memory<float> none(p), one(p);
  none.mix = {}, std::fill(one.mix.data.begin(), one.mix.data.end(), 1.0f);
  none.run(serial), one.run(serial);
  CHECK(one.out == none.out);
  for (idx_t c = 0; c < 17; ++c) {
    CHECK(none.out(1, 0, 0, c) == none.initial_state(1, 0, 0, c));
    CHECK(none.out(1, 0, 69, c) == none.x(1, 0, 68, c));
  }
  // The difference of the two tokens overflows, their mean does not.
  tensor<float> x(1, 1, 2, 3, 3e38f), out = x;
  const tensor<float> half(1, 1, 1, 3, 0.5f);
  for (idx_t c = 0; c < 3; ++c) x(0, 0, 1, c) = -3e38f;
  compiled_layers<float>::token_shift(sequence(std::as_const(x)), sequence(out), {.mix = vector(half)}, {}, serial);
  for (idx_t c = 0; c < 3; ++c) CHECK(out(0, 0, 1, c) == 0);
}

TEMPLATE_LIST_TEST_CASE("token_shift: lengths, with anything in the padding", "[token_shift]", all_types) {
  using S = TestType;
  for (idx_t channels : {5, 16}) {
    auto p = random_token_shift(4, 70, channels);
    p.lengths = {70, 0, 2, 65};
    check<S>(p);
    check_layer_backward(case_of<S>(p));
    token_shift_memory<S> clean(rounded<S>(p)), bad = clean;
    tensor<S> d_both = cast<S>(random_sequence(9, 4, 71, channels));
    const auto c = case_of<S>(p);
    attn::execution serial;
    const auto gradients = [&](const tensor<S>& x) {
      return all_gradients(c, {x, clean.mix, clean.initial_state}, d_both, serial);
    };
    const auto wanted = gradients(clean.x);
    for (idx_t b = 0; b < 4; ++b)
      for (idx_t t = p.lengths[static_cast<std::size_t>(b)]; t < 70; ++t)
        for (idx_t e = 0; e < channels; ++e)
          bad.x(b, 0, t, e) = d_both(b, 0, t, e) = std::numeric_limits<S>::quiet_NaN();
    clean.run(serial), bad.run(serial);
    CHECK(bad.out == clean.out);
    CHECK(bad.final_state == clean.final_state);
    CHECK(gradients(bad.x) == wanted);
  }
}

TEMPLATE_LIST_TEST_CASE("token_shift_state: steps and chunks give the bits of one call", "[token_shift]", all_types) {
  using S = TestType;
  for (bool mixed : {false, true}) {
    auto p = random_token_shift(3, 24, 17);
    p.initial_state = {};
    if (!mixed) p.mix = {};
    token_shift_memory<S> m(rounded<S>(p));
    attn::execution serial;
    m.run(serial);
    attn::token_shift_state<S> state({.batch = 3, .channels = 17});
    CHECK(state.bytes() == 3 * 17 * sizeof(S));
    CHECK(fed(state, m, {1, 1, 2, 0, 13, 1, 6}) == m.out);
    CHECK(state.tokens() == 24);
    for (idx_t b = 0; b < 3; ++b)
      for (idx_t c = 0; c < 17; ++c) CHECK(state.value(b, c) == m.final_state(b, 0, 0, c));
    state.reset();
    CHECK(fed(state, m, {24}) == m.out);
  }
}

TEST_CASE("token_shift: chunks by the states that are options", "[token_shift]") {
  const auto p = rounded<float>(random_token_shift(2, 12, 8));
  token_shift_memory<float> m(p);
  attn::execution serial;
  m.run(serial);
  const auto x = sequence(std::as_const(m.x));
  tensor<float> out = m.out, between = m.final_state, last = m.final_state;
  std::fill(out.data.begin(), out.data.end(), 7.0f);
  compiled_layers<float>::token_shift(
      x.slice(1, 0, 5), sequence(out).slice(1, 0, 5), m.weights(),
      {.initial_state = state_view(m.initial_state), .final_state = state_or_none(&between)}, serial);
  compiled_layers<float>::token_shift(
      x.slice(1, 5, 7), sequence(out).slice(1, 5, 7), m.weights(),
      {.initial_state = state_view(between), .final_state = state_or_none(&last)}, serial);
  CHECK(out == m.out);
  CHECK(last == m.final_state);
}

TEST_CASE("token_shift_state: items, lengths, append", "[token_shift]") {
  auto p = random_token_shift(2, 12, 8);
  p.initial_state = {};
  token_shift_memory<float> m(p);
  attn::execution serial;
  m.run(serial);
  attn::token_shift_state<float> state({.batch = 2, .channels = 8});
  const auto x = sequence(std::as_const(m.x));
  tensor<float> out = m.out;
  compiled_layers<float>::token_shift_step(state, x.slice(1, 0, 5), sequence(out).slice(1, 0, 5), m.weights(),
                                           {.lengths = std::vector<idx_t>{5, 2}}, serial);
  CHECK(state.tokens(0) == 5);
  CHECK(state.tokens(1) == 2);
  for (idx_t c = 0; c < 8; ++c) {
    CHECK(out(0, 0, 4, c) == m.out(0, 0, 4, c));
    CHECK(out(1, 0, 1, c) == m.out(1, 0, 1, c));
    CHECK(out(1, 0, 2, c) == 0);
    CHECK(state.value(1, c) == m.x(1, 0, 1, c));
  }
  state.append(x.slice(1, 5, 2), {.lengths = std::vector<idx_t>{2, 0}});
  const auto branch = state;
  state.reset(1);
  CHECK(state.value(1, 3) == 0);
  state.copy_item(0, 1);
  state.reorder(std::vector<idx_t>{1, 0});
  CHECK(state.tokens(1) == 7);
  compiled_layers<float>::token_shift_step(state, x.slice(1, 7, 5), sequence(out).slice(1, 7, 5), m.weights(), {},
                                           serial);
  for (idx_t i = 7; i < 12; ++i)
    for (idx_t c = 0; c < 8; ++c) CHECK(out(0, 0, i, c) == m.out(0, 0, i, c));
  CHECK(branch.tokens(1) == 2);
  CHECK(branch.value(1, 3) == m.x(1, 0, 1, 3));
}

TEST_CASE("token_shift: Eigen matrices and default arguments", "[token_shift]") {
  const Eigen::MatrixXf x = Eigen::MatrixXf::Random(9, 6), d = Eigen::MatrixXf::Random(9, 6);
  const Eigen::VectorXf m = Eigen::VectorXf::Constant(6, 0.25f);
  Eigen::MatrixXf out(9, 6), other(9, 6), dx(9, 6), last(1, 6);
  Eigen::VectorXf dm(6);
  attn::execution threads(2, 0);
  attn::token_shift(x, out);
  CHECK(out.bottomRows(8) == x.topRows(8));
  CHECK(out.row(0).norm() == 0);
  attn::token_shift(x, other, {.mix = m}, {.final_state = last}, threads);
  CHECK((other - (x + 0.25f * (out - x))).norm() < 1e-5f);
  CHECK(last == x.bottomRows(1));
  attn::token_shift(x, out, threads);
  attn::token_shift_backward(x, {.mix = m}, d, {.x = dx, .mix = dm}, threads);
  CHECK((dm.transpose() - d.cwiseProduct(out - x).colwise().sum()).norm() < 1e-5f);
  attn::token_shift_state<float> state({.channels = 6});
  attn::token_shift_step(state, x, out, {.mix = m});
  CHECK(out == other);
}

TEMPLATE_LIST_TEST_CASE("token_shift_backward: against the reverse pass", "[token_shift]", all_types) {
  for (idx_t length : {0, 1, 3, 63, 66, 130}) {
    auto p = random_token_shift(1 + length % 3, length, length == 66 ? 16 : 5);
    check_layer_backward(case_of<TestType>(p));
    p.initial_state = {};
    if (length == 3) p.mix = {};
    check_layer_backward(case_of<TestType>(p));
  }
  check_layer_backward(case_of<TestType>(random_token_shift(2, 9, 0)));
}

TEST_CASE("token_shift_backward: the reverse pass against central differences", "[token_shift]") {
  check_central_differences(case_of<float>(random_token_shift(2, 6, 3)).reference);
}

// Sums over so many equal terms err by no more than those of a segment, and an offset of x costs them nothing.
TEST_CASE("token_shift_backward: long sequences", "[token_shift]") {
  constexpr idx_t length = 262144;
  tensor<float> x(1, 1, length, 1), d_out = x, mix(1, 1, 1, 1), d_mix = mix;
  for (idx_t t = 0; t < length; ++t) x(0, 0, t, 0) = 4096 + 0.5f * float(t % 2), d_out(0, 0, t, 0) = t % 2 ? 0.7f : 0;
  attn::execution serial;
  attn::token_shift_gradients<float> g;
  g.mix = vector_or_none(&d_mix);
  compiled_layers<float>::token_shift_backward(sequence(std::as_const(x)), {.mix = vector(mix)},
                                               sequence(std::as_const(d_out)), g, {}, serial);
  CHECK(std::abs(d_mix(0, 0, 0, 0) / (-0.35f * (length / 2)) - 1) <= 4e-6f);
}

}  // namespace testing::token_shift_tests
