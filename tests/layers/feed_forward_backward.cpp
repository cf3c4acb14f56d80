// feed_forward_backward and the derivatives of the activations against the reverse pass of their reference.
#include "layers/gradients.hpp"

namespace testing::feed_forward_backward_tests {
namespace {

struct feed_case {
  idx_t batch = 2, length = 20, inputs = 8, hidden = 20, outputs = 8;
  bool up_bias = true, down_bias = true, gated = false;
  attn::activation f = attn::activation::gelu;
  double scale = 1;  // of the inputs
};

template <class S>
layer_backward_case<S> case_of(const feed_case& a) {
  layer_backward_case<S> c;
  auto& r = c.reference;
  r.name = "batch " + std::to_string(a.batch) + ", length " + std::to_string(a.length) + ", " +
           std::to_string(a.inputs) + " to " + std::to_string(a.hidden) + " to " + std::to_string(a.outputs) +
           ", activation " + std::to_string(static_cast<int>(a.f));
  add(r, "x", random_normal(1, a.batch, 1, a.length, a.inputs, a.scale));
  add(r, "up", random_weight(2, a.hidden, a.inputs));
  add(r, "down", random_weight(3, a.outputs, a.hidden));
  if (a.gated) add(r, "gate", random_weight(6, a.hidden, a.inputs));
  if (a.up_bias) add(r, "up_bias", random_vector(4, a.hidden));
  if (a.up_bias && a.gated) add(r, "gate_bias", random_vector(7, a.hidden));
  if (a.down_bias) add(r, "down_bias", random_vector(5, a.outputs));
  r.forward = [a](const std::vector<tensor<variable>>& in) {
    next_of<tensor<variable>> next(in);
    const auto x = next();
    reference::basic_feed_forward_weights<variable> w;
    w.up = next(), w.down = next(), w.gate = next(a.gated), w.up_bias = next(a.up_bias);
    w.gate_bias = next(a.up_bias && a.gated), w.down_bias = next(a.down_bias);
    return std::vector{reference::feed_forward(x, w, [&](const variable& v) { return activated(a.f, v); })};
  };
  c.run = [a](const std::vector<tensor<S>>& in, const tensor<S>& d_out, const std::vector<tensor<S>*>& to,
              bool accumulate, attn::execution& exec) {
    attn::feed_forward_weights<S> w{.up = matrix(in[1]), .down = matrix(in[2])};
    if (a.gated) w.gate = matrix(in[3]);
    const std::size_t up_bias = a.gated ? 4 : 3;
    if (a.up_bias) w.up_bias = vector(in[up_bias]);
    if (a.up_bias && a.gated) w.gate_bias = vector(in[5]);
    if (a.down_bias) w.down_bias = vector(in.back());
    attn::feed_forward_gradients<S> g{.x = sequence_or_none(to[0]),
                                      .up = matrix_or_none(to[1]),
                                      .down = matrix_or_none(to[2]),
                                      .accumulate = accumulate};
    if (a.gated) g.gate = matrix_or_none(to[3]);
    if (a.up_bias) g.up_bias = vector_or_none(to[up_bias]);
    if (a.up_bias && a.gated) g.gate_bias = vector_or_none(to[5]);
    if (a.down_bias) g.down_bias = vector_or_none(to.back());
    compiled_layers<S>::feed_forward_backward(sequence(in[0]), w, sequence(d_out), g, a.f, exec);
  };
  return c;
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("feed_forward_backward: against the reverse pass", "[feed_forward_backward]", all_types) {
  int n = 0;
  for (idx_t length : {0, 1, 3, 47, 65})
    for (idx_t hidden : {1, 20, 70})
      for (int f = 0; f < 4; ++f) {
        ++n;
        check_layer_backward(case_of<TestType>({.length = length,
                                                .inputs = 5 + 8 * (n % 2),
                                                .hidden = hidden,
                                                .outputs = 9,
                                                .up_bias = n % 2 == 0,
                                                .down_bias = n % 3 == 0,
                                                .gated = n % 5 < 2,
                                                .f = static_cast<attn::activation>(f)}),
                             2);  // of h, rounded in the forward reference only, and of its gradient
      }
}

TEMPLATE_LIST_TEST_CASE("feed_forward_backward: tanh, sigmoid, identity", "[feed_forward_backward]", all_types) {
  for (idx_t length : {0, 3, 47, 65})
    for (idx_t hidden : {20, 70})
      for (auto f : {attn::activation::tanh, attn::activation::sigmoid, attn::activation::identity})
        check_layer_backward(case_of<TestType>({.length = length, .hidden = hidden, .gated = length == 47, .f = f}), 2);
}

// Several chunks of tokens, blocks of hidden numbers.
TEMPLATE_LIST_TEST_CASE("feed_forward_backward: what is split", "[feed_forward_backward]", exact_types) {
  check_layer_backward(case_of<TestType>({.batch = 3, .length = 330, .inputs = 3, .hidden = 5, .outputs = 4}));
  check_layer_backward(case_of<TestType>({.length = 5, .hidden = 1100}));
  check_layer_backward(case_of<TestType>({.length = 5, .hidden = 1100, .gated = true, .f = attn::activation::silu}));
  check_layer_backward(
      case_of<TestType>({.batch = 3, .length = 330, .inputs = 3, .hidden = 5, .outputs = 4, .gated = true}));
  check_layer_backward(case_of<TestType>({.length = 5, .inputs = 530, .hidden = 20, .outputs = 530}));
}

TEST_CASE("feed_forward_backward: no features", "[feed_forward_backward]") {
  check_layer_backward(case_of<float>({.inputs = 0}));
  check_layer_backward(case_of<float>({.hidden = 0}));
  check_layer_backward(case_of<float>({.outputs = 0}));
}

TEMPLATE_LIST_TEST_CASE("feed_forward_backward: hidden numbers far from 0", "[feed_forward_backward]", exact_types) {
  for (int f = 0; f < 7; ++f)
    for (double scale : {5.0, 100.0}) {
      // the slopes of tanh and sigmoid fall as e^-|x| does: the rounding of x counts
      const auto kind = static_cast<attn::activation>(f);
      const bool falls = kind == attn::activation::tanh || kind == attn::activation::sigmoid;
      check_layer_backward(case_of<TestType>({.f = kind, .scale = scale}), falls ? 2 : 1);
    }
}

// Each derivative alone: x of one feature, weights 1.
TEMPLATE_LIST_TEST_CASE("feed_forward_backward: the slopes of the activations", "[feed_forward_backward]",
                        exact_types) {
  using S = TestType;
  for (int kind = 0; kind < 7; ++kind) {
    const auto f = static_cast<attn::activation>(kind);
    tensor<S> x(1, 1, 4001, 1), one(1, 1, 1, 1, S(1)), d(1, 1, 4001, 1, S(1)), dx = x;
    for (idx_t i = 0; i < 4001; ++i) x(0, 0, i, 0) = static_cast<S>(static_cast<double>(i - 2000) * 0.01 + 0.003);
    attn::execution serial;
    compiled_layers<S>::feed_forward_backward(sequence(std::as_const(x)),
                                              {.up = matrix(std::as_const(one)), .down = matrix(std::as_const(one))},
                                              sequence(std::as_const(d)), {.x = sequence(dx)}, f, serial);
    double worst = 0;
    for (idx_t i = 0; i < 4001; ++i) {
      reference::variable::forget();
      tensor<variable> at(1, 1, 1, 1, reference::variable::independent(static_cast<double>(x(0, 0, i, 0)))), y = at;
      y.data[0] = activated(f, at.data[0]);
      const reference::reverse_pass back({{y, tensor<double>(1, 1, 1, 1, 1.0)}});
      worst = std::max(worst, std::abs(back.gradient(at).data[0] - static_cast<double>(dx(0, 0, i, 0))));
    }
    CAPTURE(kind);
    CHECK(worst <= (sizeof(S) == 4 ? 4e-7 : 1e-15));
    for (S far : {S(1e4), std::numeric_limits<S>::infinity()}) {
      x(0, 0, 0, 0) = far, x(0, 0, 1, 0) = -far, x(0, 0, 2, 0) = 0;
      compiled_layers<S>::feed_forward_backward(sequence(std::as_const(x)),
                                                {.up = matrix(std::as_const(one)), .down = matrix(std::as_const(one))},
                                                sequence(std::as_const(d)), {.x = sequence(dx)}, f, serial);
      // relu, gelu, gelu_tanh, silu, tanh, sigmoid, identity
      constexpr S above[] = {1, 1, 1, 1, 0, 0, 1}, below[] = {0, 0, 0, 0, 0, 0, 1},
                  at_0[] = {0, S(0.5), S(0.5), S(0.5), 1, S(0.25), 1};
      CHECK(dx(0, 0, 0, 0) == above[kind]);
      CHECK(dx(0, 0, 1, 0) == below[kind]);
      CHECK(std::abs(dx(0, 0, 2, 0) - at_0[kind]) <= S(1e-7));
    }
  }
}

TEST_CASE("feed_forward_backward: the reverse pass against central differences", "[feed_forward_backward]") {
  for (int f = 0; f < 7; ++f)
    for (bool gated : {false, true})
      check_central_differences(
          case_of<float>({.length = 6, .gated = gated, .f = static_cast<attn::activation>(f)}).reference);
}

TEST_CASE("feed_forward_backward: Eigen matrices and default arguments", "[feed_forward_backward]") {
  using matrix = Eigen::MatrixXf;
  const matrix x = matrix::Random(9, 6), u = matrix::Random(4, 6), v = matrix::Random(3, 4), d = matrix::Random(9, 3);
  matrix dx(9, 6), dv(3, 4), other(3, 4);
  attn::feed_forward_backward(x, {.up = u, .down = v}, d, {.x = dx, .down = dv},
                              {.activation = attn::activation::relu});
  const matrix hidden = (x * u.transpose()).cwiseMax(0.0f);
  CHECK((dv - d.transpose() * hidden).norm() < 1e-5f);
  CHECK((dx - (d * v).cwiseProduct((hidden.array() > 0).cast<float>().matrix()) * u).norm() < 1e-5f);
  attn::execution threads(2, 0);
  attn::feed_forward_backward(x, {.up = u, .down = v}, d, {.down = dv}, threads);
  attn::feed_forward_backward(x, {.up = u, .down = v}, d, {.down = other});
  CHECK(dv == other);
}

}  // namespace testing::feed_forward_backward_tests
