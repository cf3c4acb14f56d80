// reversible_block against its reference, and there and back.
#include "layers/layers.hpp"

namespace testing::reversible_block_tests {
namespace {

// The functions of a layer, as the golden cases have them: attention with q = k = x and v = x W^T; tanh(x W^T + b).
template <class S>
struct functions {
  tensor<S> value, weight, bias;

  functions(idx_t dim, idx_t layer, double gain)
      : value(cast<S>(random_weight(10 + 2 * layer, dim, dim, gain))),
        weight(cast<S>(random_weight(11 + 2 * layer, dim, dim, gain))),
        bias(cast<S>(random_vector(100 + layer, dim, 0.1))) {}

  void attention(in_sequence<S> x, out_sequence<S> out, attn::execution& exec) const {
    tensor<S> v(x.extent(0), 1, x.extent(1), x.extent(2));
    compiled_layers<S>::project(x, sequence(v), {.weight = matrix(value)}, exec);
    full_attention<S>()(attn::split_heads(x, 1), attn::split_heads(x, 1), view(std::as_const(v)),
                        attn::split_heads(out, 1), exec);
  }
  void tanh(in_sequence<S> x, out_sequence<S> out, attn::execution& exec) const {
    compiled_layers<S>::project(x, out, {.weight = matrix(weight), .bias = vector(bias)}, exec);
    for (idx_t b = 0; b < out.extent(0); ++b)
      for (idx_t i = 0; i < out.extent(1); ++i)
        for (idx_t d = 0; d < out.extent(2); ++d)
          out(b, i, d) = static_cast<S>(std::tanh(static_cast<real<S>>(out(b, i, d))));
  }
  mixer_of<S> f() const {
    return [this](in_sequence<S> x, out_sequence<S> out, attn::execution& exec) { attention(x, out, exec); };
  }
  mixer_of<S> g() const {
    return [this](in_sequence<S> x, out_sequence<S> out, attn::execution& exec) { tanh(x, out, exec); };
  }
};

template <class S>
std::vector<functions<S>> stack(idx_t dim, double gain, idx_t layers = 24) {
  std::vector<functions<S>> all;
  for (idx_t layer = 0; layer < layers; ++layer) all.emplace_back(dim, layer, gain);
  return all;
}

// There and back through a stack, in place: the error relative to x.
template <class S>
double round_trip(const std::vector<functions<S>>& layers, bool with_remainder, int threads = 1) {
  const idx_t dim = layers[0].value.dim();
  const tensor<S> x = cast<S>(random_sequence(1, 2, 40, 2 * dim));
  tensor<S> y = x, rest(2, 1, 40, 2 * dim);
  attn::reversible_block_options<S> options;
  if (with_remainder) options.remainder = sequence(rest);
  attn::execution exec(threads, 0);
  for (const auto& layer : layers)
    compiled_layers<S>::reversible_block(sequence(std::as_const(y)), sequence(y), layer.f(), layer.g(), options, exec);
  CHECK(relative_error(y, x) > 0.5);
  for (auto layer = layers.rbegin(); layer != layers.rend(); ++layer)
    compiled_layers<S>::reversible_block_inverse(sequence(std::as_const(y)), sequence(y), layer->f(), layer->g(),
                                                 options, exec);
  return relative_error(y, x);
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("reversible_block: against the reference", "[reversible_block]", all_types) {
  using S = TestType;
  for (idx_t length : {0, 1, 65, 130})
    for (idx_t dim : {0, 1, 8, 33}) {
      CAPTURE(length, dim);
      const auto x = rounded<S>(random_sequence(1, 2, length, 2 * dim));
      const tensor<S> sx = cast<S>(x);
      tensor<S> out(2, 1, length, 2 * dim, S(7));
      const mixer_of<S> f = [](auto s, auto to, attn::execution&) {
        for (idx_t b = 0; b < s.extent(0); ++b)
          for (idx_t i = 0; i < s.extent(1); ++i)
            for (idx_t d = 0; d < s.extent(2); ++d)
              to(b, i, d) = static_cast<S>(static_cast<real<S>>(s(b, s.extent(1) - 1 - i, d)) / 2);
      };
      const auto wanted_f = [](const tensor<double>& s) {
        tensor<double> to = s;
        for (idx_t b = 0; b < s.batch(); ++b)
          for (idx_t i = 0; i < s.length(); ++i)
            for (idx_t d = 0; d < s.dim(); ++d) to(b, 0, i, d) = s(b, 0, s.length() - 1 - i, d) / 2;
        return to;
      };
      attn::execution serial;
      compiled_layers<S>::reversible_block(sequence(sx), sequence(out), f, f, {}, serial);
      // two sums and f are rounded to the storage type
      CHECK(relative_error(out, reference::reversible_block(x, wanted_f, wanted_f)) <= 2 * tolerance<S>::out);
      tensor<S> in_place = sx, back(2, 1, length, 2 * dim, S(7));
      compiled_layers<S>::reversible_block(sequence(std::as_const(in_place)), sequence(in_place), f, f, {}, serial);
      CHECK(in_place == out);
      compiled_layers<S>::reversible_block_inverse(sequence(std::as_const(out)), sequence(back), f, f, {}, serial);
      CHECK(relative_error(back, x) <= 2 * tolerance<S>::out);
    }
}

TEST_CASE("reversible_block: there and back in float, with a remainder, to the last bit", "[reversible_block]") {
  for (double gain : {0.25, 0.5, 1.0, 2.0})
    for (idx_t dim : {6, 32}) {
      CAPTURE(gain, dim);
      CHECK(round_trip(stack<float>(dim, gain), true) == 0);
      CHECK(round_trip(stack<float>(dim, gain), true, 3) == 0);
    }
  CHECK(round_trip(stack<float>(6, 1, 400), true) == 0);
}

TEST_CASE("reversible_block: 24 layers there and back in float, without", "[reversible_block]") {
  CHECK(round_trip(stack<float>(32, 0.25), false) <= 1e-6);
  // steep functions magnify what rounding takes: 1e-4 here
  CHECK(round_trip(stack<float>(32, 1), false) <= 1e-3);
}

#if !defined(ATTN_TEST_FEW_TYPES)
TEST_CASE("reversible_block: 24 layers there and back in double", "[reversible_block]") {
  CHECK(round_trip(stack<double>(16, 1), false) <= 1e-12);
  CHECK(round_trip(stack<double>(16, 1), true) == 0);
}
#endif

TEMPLATE_LIST_TEST_CASE("reversible_block: a remainder for 16-bit streams", "[reversible_block]", storage_types) {
  // 22 or 16 digits of the sum are kept, where the stream alone has 11 or 8; what is between the digits of a stream may
  // be rounded otherwise in products of bf16 numbers
  const bool paired = attn::detail::numbers_of<attn::detail::product_type<TestType>> > 1;
  const double share = paired ? 0.1 : 0.05;
  CHECK(round_trip(stack<TestType>(16, 0.25, 6), true) <= share * round_trip(stack<TestType>(16, 0.25, 6), false));
}

TEST_CASE("reversible_block: what the second function throws passes through, when half of out is written",
          "[reversible_block]") {
  const tensor<float> x = cast<float>(random_sequence(1, 1, 5, 8));
  tensor<float> out(1, 1, 5, 8, 7.0f);
  const mixer_of<float> zero = [](auto, auto to, attn::execution&) {
    for (idx_t i = 0; i < 5; ++i)
      for (idx_t d = 0; d < 4; ++d) to(0, i, d) = 0;
  };
  const mixer_of<float> thrower = [](auto, auto, attn::execution&) { throw std::runtime_error("g"); };
  attn::execution serial;
  const auto call = [&](const mixer_of<float>& g) {
    compiled_layers<float>::reversible_block(sequence(x), sequence(out), zero, g, {}, serial);
  };
  CHECK_THROWS_AS(call(thrower), std::runtime_error);
  for (idx_t i = 0; i < 5; ++i)
    for (idx_t d = 0; d < 8; ++d) CHECK(out(0, 0, i, d) == (d < 4 ? x(0, 0, i, d) : 7.0f));
  call(zero);  // and the execution is sound
  CHECK(out == x);
}

TEST_CASE("reversible_block: Eigen matrices and default arguments", "[reversible_block]") {
  const Eigen::MatrixXf x = Eigen::MatrixXf::Random(9, 6);
  Eigen::MatrixXf y(9, 6), back(9, 6);
  const auto half = [](auto s, auto to, attn::execution&) {
    for (idx_t i = 0; i < s.extent(1); ++i)
      for (idx_t d = 0; d < s.extent(2); ++d) to(0, i, d) = s(0, i, d) / 2;
  };
  attn::reversible_block(x, y, half, half);
  CHECK((y.leftCols(3) - x.leftCols(3) - x.rightCols(3) / 2).norm() < 1e-6f);
  attn::reversible_block_inverse(y, back, half, half);
  CHECK((back - x).norm() < 1e-6f);
  attn::execution threads(2, 0);
  attn::reversible_block(x, back, half, half, threads);
  CHECK(back == y);
  attn::reversible_block_inverse(y, back, half, half, {}, attn::execution(2));
  CHECK((back - x).norm() < 1e-6f);
}

}  // namespace testing::reversible_block_tests
