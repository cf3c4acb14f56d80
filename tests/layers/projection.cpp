// The linear layer, layer norm and feed-forward against their references.
#include <attn/core/tensor.hpp>

#include "layers/layers.hpp"

namespace testing::projection_tests {
namespace {

template <class S>
double project_error(idx_t batch, idx_t length, idx_t inputs, idx_t outputs, bool bias) {
  const auto x = rounded<S>(random_sequence(1, batch, length, inputs));
  const auto w = rounded<S>(random_weight(2, outputs, inputs));
  const auto b = bias ? rounded<S>(random_vector(3, outputs)) : tensor<double>{};
  const tensor<S> sx = cast<S>(x), sw = cast<S>(w), sb = cast<S>(b);
  tensor<S> out(batch, 1, length, outputs, S(7));
  attn::execution serial;
  compiled_layers<S>::project(sequence(sx), sequence(out), {.weight = matrix(sw), .bias = vector(sb)}, serial);
  return relative_error(out, reference::project(x, w, b));
}

template <class S>
double norm_error(idx_t length, idx_t dim, bool parameters, double eps, double offset, double size = 1) {
  auto x = random_sequence(1, 2, length, dim);
  for (double& value : x.data) value = (value + offset) * size;
  x = rounded<S>(x);
  const auto gamma = parameters ? rounded<S>(random_vector(2, dim)) : tensor<double>{};
  const auto beta = parameters ? rounded<S>(random_vector(3, dim)) : tensor<double>{};
  const tensor<S> sx = cast<S>(x), sg = cast<S>(gamma), sb = cast<S>(beta);
  tensor<S> out(2, 1, length, dim, S(7));
  const attn::layer_norm_weights<S> weights{.gamma = vector(sg), .beta = vector(sb)};
  const attn::layer_norm_options<S> options{.eps = static_cast<real<S>>(eps)};
  attn::execution serial;
  compiled_layers<S>::layer_norm(sequence(sx), sequence(out), weights, options, serial);
  tensor<S> in_place = sx;
  compiled_layers<S>::layer_norm(sequence(in_place), sequence(in_place), weights, options, serial);
  CHECK(in_place == out);
  const attn::rms_norm_weights<S> scales{.gamma = vector(sg)};
  const attn::rms_norm_options<S> same_eps{.eps = options.eps};
  compiled_layers<S>::rms_norm(sequence(sx), sequence(in_place), scales, same_eps, serial);
  const double stored_eps = static_cast<double>(options.eps);
  CHECK(relative_error(in_place, reference::rms_norm(x, gamma, stored_eps)) <= tolerance<S>::out);
  tensor<S> again = sx;
  compiled_layers<S>::rms_norm(sequence(again), sequence(again), scales, same_eps, serial);
  CHECK(in_place == again);
  return relative_error(out, reference::layer_norm(x, gamma, beta, stored_eps));
}

double (*formula(attn::activation f))(double) {
  constexpr double (*all[])(double) = {reference::relu,    reference::gelu,    reference::gelu_tanh, reference::silu,
                                       reference::tangent, reference::sigmoid, reference::identity};
  return all[static_cast<std::size_t>(f)];
}
constexpr attn::activation every_activation[] = {
    attn::activation::relu, attn::activation::gelu,    attn::activation::gelu_tanh, attn::activation::silu,
    attn::activation::tanh, attn::activation::sigmoid, attn::activation::identity};

template <class S>
double feed_forward_error(idx_t length, idx_t inputs, idx_t hidden, idx_t outputs, bool biases, attn::activation f,
                          idx_t batch = 2, bool gated = false) {
  const auto x = rounded<S>(random_sequence(1, batch, length, inputs));
  const auto w = rounded<S>(random_feed_forward(inputs, hidden, outputs, biases, gated));
  const feed_forward_store<S> stored(w);
  const tensor<S> sx = cast<S>(x);
  tensor<S> out(batch, 1, length, outputs, S(7));
  attn::execution serial;
  compiled_layers<S>::feed_forward(sequence(sx), sequence(out), stored.views(), f, serial);
  return relative_error(out, reference::feed_forward(x, w, formula(f)));
}

// The activation alone: the feed-forward layer with weights of 1 for one number.
template <class S>
S activated(attn::activation f, S x) {
  const S one(1);
  S out(7);
  attn::execution serial;
  compiled_layers<S>::feed_forward({&x, {1, 1, 1}}, {&out, {1, 1, 1}}, {.up = {&one, {1, 1}}, .down = {&one, {1, 1}}},
                                   f, serial);
  return out;
}

// In more digits than double, which in the tails would be off by the rounding of the exponent.
double exactly(attn::activation f, long double x) {
  constexpr long double pi = 3.14159265358979323846264338328L;
  if (f == attn::activation::relu) return static_cast<double>(x < 0 ? 0 : x);
  if (f == attn::activation::gelu) return static_cast<double>(x / 2 * std::erfc(-x / std::sqrt(2.0L)));
  if (f == attn::activation::silu) return static_cast<double>(x / (1 + std::exp(-x)));
  if (f == attn::activation::tanh) return static_cast<double>(std::tanh(x));
  if (f == attn::activation::sigmoid) return static_cast<double>(1 / (1 + std::exp(-x)));
  if (f == attn::activation::identity) return static_cast<double>(x);
  return static_cast<double>(x / (1 + std::exp(-2 * std::sqrt(2 / pi) * (x + 0.044715L * x * x * x))));
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("project: against the reference", "[projection]", all_types) {
  for (idx_t length : {0, 1, 2, 4, 5, 8, 12, 24, 25, 49, 130})
    for (idx_t inputs : {0, 1, 7, 33, 64})
      for (idx_t outputs : {0, 1, 15, 64, 70}) {
        CAPTURE(length, inputs, outputs);
        CHECK(project_error<TestType>(2, length, inputs, outputs, (length + inputs) % 2 == 0) <=
              tolerance<TestType>::out);
      }
  CHECK(project_error<TestType>(33, 3, 64, 70, true) <= tolerance<TestType>::out);  // more than a block of few tokens
  CHECK(project_error<TestType>(1, 2, 5000, 9, true) <= tolerance<TestType>::out);  // and in place into pieces of 4096
  for (idx_t inputs : {511, 512, 513, 1100}) {                                      // sums are split into blocks of 512
    CAPTURE(inputs);
    CHECK(project_error<TestType>(1, 31, inputs, 140, true) <= tolerance<TestType>::out);
    CHECK(project_error<TestType>(3, 31, inputs, 140, true) <= tolerance<TestType>::out);
  }
}

// Up to 8 tokens the numbers of a weight are multiplied where they lie, by rows or by columns; more are the same sums.
TEMPLATE_LIST_TEST_CASE("project: a transposed weight is a view", "[projection]", all_types) {
  for (const auto& [inputs, outputs] :
       {std::pair<idx_t, idx_t>{9, 13}, {9, 0}, {1, 70}, {70, 1}, {23, 600}, {1100, 530}}) {
    const auto w = cast<TestType>(random_weight(2, outputs, inputs));
    tensor<TestType> turned(1, 1, inputs, outputs);
    for (idx_t o = 0; o < outputs; ++o)
      for (idx_t i = 0; i < inputs; ++i) turned(0, 0, i, o) = w(0, 0, o, i);
    const in_matrix<TestType> transposed(turned.data.data(), {outputs, inputs}, {1, outputs});
    for (idx_t length : {1, 2, 3, 4, 5, 7, 8, 9, 20, 49}) {
      CAPTURE(inputs, outputs, length);
      const auto x = cast<TestType>(random_sequence(1, 2, length, inputs));
      tensor<TestType> out(2, 1, length, outputs), other = out;
      attn::execution serial;
      compiled_layers<TestType>::project(sequence(x), sequence(out), {.weight = matrix(w)}, serial);
      compiled_layers<TestType>::project(sequence(x), sequence(other), {.weight = transposed}, serial);
      if (length > 8)
        CHECK(out == other);
      else
        CHECK(relative_error(out, other) <= tolerance<TestType>::out);
    }
  }
}

TEMPLATE_LIST_TEST_CASE("project: one weight for each head", "[projection]", all_types) {
  using S = TestType;
  attn::execution serial, several(3, 0);
  for (idx_t length : {0, 1, 7, 50, 130})
    for (idx_t heads : {1, 2, 5})
      for (bool bias : {false, true}) {
        CAPTURE(length, heads, bias);
        const idx_t inputs = 7, outputs = 9;
        const auto x = rounded<S>(random_sequence(1, 2, length, heads * inputs));
        const auto w = rounded<S>(random_normal(2, 1, heads, outputs, inputs, 0.4));
        const auto b = bias ? rounded<S>(random_vector(3, heads * outputs)) : tensor<double>{};
        const tensor<S> sx = cast<S>(x), sw = cast<S>(w), sb = cast<S>(b);
        tensor<S> out(2, 1, length, heads * outputs, S(7)), other = out, alone = out;
        compiled_layers<S>::project(sequence(sx), sequence(out), {.weight = matrices(sw), .bias = vector(sb)}, serial);
        CHECK(relative_error(out, reference::project(x, w, b)) <= tolerance<S>::out);
        for (idx_t h = 0; h < heads; ++h)
          compiled_layers<S>::project(
              sequence(std::as_const(sx)).slice(2, h * inputs, inputs), sequence(alone).slice(2, h * outputs, outputs),
              {.weight = {sw.data.data() + h * outputs * inputs, {outputs, inputs}},
               .bias = bias ? vector(sb).slice(0, h * outputs, outputs) : in_vector<S>()},
              serial);
        CHECK(out == alone);
        compiled_layers<S>::project(sequence(sx), sequence(other), {.weight = matrices(sw), .bias = vector(sb)},
                                    several);
        CHECK(out == other);
        // with the heads' weights side by side in one matrix, [outputs, heads * inputs]
        tensor<S> beside(1, 1, outputs, heads * inputs);
        for (idx_t h = 0; h < heads; ++h)
          for (idx_t o = 0; o < outputs; ++o)
            for (idx_t d = 0; d < inputs; ++d) beside(0, 0, o, h * inputs + d) = sw(0, h, o, d);
        const idx_t row = heads * inputs;
        compiled_layers<S>::project(
            sequence(sx), sequence(other),
            {.weight = {beside.data.data(), {heads, outputs, inputs}, {inputs, row, 1}}, .bias = vector(sb)}, serial);
        CHECK(out == other);
      }
}

TEST_CASE("weights: a matrix of one row or one column is a vector", "[projection]") {
  const Eigen::MatrixXf x = Eigen::MatrixXf::Random(6, 4), w = Eigen::MatrixXf::Random(3, 4);
  const Eigen::MatrixXf row = Eigen::MatrixXf::Random(1, 3), column = row.transpose();
  attn::tensor<float, 2> stored({1, 3});
  for (idx_t i = 0; i < 3; ++i) stored(0, i) = row(0, i);
  Eigen::MatrixXf wanted(6, 3), out(6, 3);
  attn::project(x, wanted, {.weight = w, .bias = Eigen::VectorXf(column).eval().col(0)});
  const auto gives = [&](const auto& bias) {
    attn::project(x, out, {.weight = w, .bias = bias});
    CHECK(out == wanted);
  };
  gives(row), gives(column), gives(stored), gives(attn::tensor_view<const float, 2>(row));
  const Eigen::MatrixXf square = Eigen::MatrixXf::Random(3, 3);
  CHECK(refusal([&] { gives(square); }) ==
        "attn: expected a vector, or a matrix of one row or one column; found a matrix [3, 3]");
}

TEST_CASE("project, layer_norm, feed_forward: Eigen matrices and default arguments", "[projection]") {
  const Eigen::MatrixXf x = Eigen::MatrixXf::Random(30, 8), w = Eigen::MatrixXf::Random(5, 8);
  const Eigen::VectorXf b = Eigen::VectorXf::Random(5);
  Eigen::MatrixXf out(30, 5);
  attn::project(x, out, {.weight = w, .bias = b});
  CHECK((out - ((x * w.transpose()).rowwise() + b.transpose())).norm() < 1e-5);
  attn::project(x, out, {.weight = w.transpose().eval().transpose()});
  CHECK((out - x * w.transpose()).norm() < 1e-5);

  Eigen::Matrix<float, -1, -1, Eigen::RowMajor> normed(30, 8);
  const std::vector<float> gamma(8, 2.0f);
  attn::layer_norm(x, normed, {.gamma = gamma});
  CHECK(std::abs(normed.row(3).norm() - 2 * std::sqrt(8.0f)) < 1e-3);
  const auto before = normed;
  attn::execution threads(2, 0);
  attn::layer_norm(x, normed, {.gamma = gamma}, threads);
  CHECK(normed == before);
  attn::layer_norm(x, normed, threads);
  CHECK((2 * normed - before).norm() < 1e-4);
  attn::layer_norm(x, normed, {}, {.eps = 1e9f}, attn::execution(2));
  CHECK(normed.norm() < 1e-2);

  Eigen::MatrixXf forth(30, 8);
  attn::feed_forward(x, forth, {.up = w, .down = w.transpose(), .up_bias = b}, {.activation = attn::activation::relu});
  const Eigen::MatrixXf hidden = ((x * w.transpose()).rowwise() + b.transpose()).cwiseMax(0);
  CHECK((forth - hidden * w).norm() < 1e-4);
  const Eigen::MatrixXf serially = forth;
  attn::feed_forward(x, forth, {.up = w, .down = w.transpose(), .up_bias = b}, {.activation = attn::activation::relu},
                     attn::execution(2));
  CHECK(forth == serially);
  attn::feed_forward(x, forth, {.up = w, .down = w.transpose()}, threads);
  attn::tensor<float, 3> owned({1, 30, 5});
  attn::project(x, owned, {.weight = w, .bias = b}, threads);
  Eigen::MatrixXf from_owned(30, 8);
  attn::project(owned, from_owned, {.weight = w.transpose()});
  CHECK((from_owned - ((x * w.transpose()).rowwise() + b.transpose()) * w).norm() < 1e-4);
}

TEMPLATE_LIST_TEST_CASE("layer_norm: against the reference", "[layer_norm]", all_types) {
  for (idx_t length : {0, 1, 65, 130})
    for (idx_t dim : {0, 1, 3, 16, 33, 64, 200})
      for (bool parameters : {false, true}) {
        CAPTURE(length, dim, parameters);
        CHECK(norm_error<TestType>(length, dim, parameters, 1e-5, 0) <= tolerance<TestType>::out);
      }
  // The mean is taken away before squares are summed: an offset of 100 costs its digits, not their square.
  CHECK(norm_error<TestType>(20, 64, true, 1e-6, 100) <= 100 * tolerance<TestType>::out);
  CHECK(norm_error<TestType>(20, 64, true, 0, 0) <= tolerance<TestType>::out);
}

TEST_CASE("norms: rows whose sums or squares leave the range of float", "[layer_norm]") {
  for (double size : {1e-38, 1e-30, 1e-20, 1e19, 1e30, 5e37}) {  // the largest of 2 80 normal numbers is below 6
    CAPTURE(size);
    for (idx_t dim : {7, 80}) CHECK(norm_error<float>(20, dim, true, 1e-5, 0, size) <= tolerance<float>::out);
  }
  CHECK(norm_error<float>(20, 80, true, 0, 0, 1e-30) <= tolerance<float>::out);
}

TEST_CASE("rms_norm: Eigen matrices and default arguments", "[layer_norm]") {
  Eigen::Matrix<float, -1, -1, Eigen::RowMajor> x = Eigen::MatrixXf::Random(30, 8), normed(30, 8), other(30, 8);
  attn::rms_norm(x, normed);
  CHECK(std::abs(normed.row(3).norm() - std::sqrt(8.0f)) < 1e-3);
  attn::execution threads(2, 0);
  const Eigen::VectorXf gamma = Eigen::VectorXf::Constant(8, 2.0f);
  attn::rms_norm(x, other, {.gamma = gamma}, threads);
  CHECK((other - 2 * normed).norm() < 1e-4);
  attn::rms_norm(x, x, {}, {.eps = 1e9f}, attn::execution(2));
  CHECK(x.norm() < 1e-2);
}

TEST_CASE("layer_norm: equal features become beta", "[layer_norm]") {
  const tensor<float> x(1, 1, 3, 5, 0.75f), gamma(1, 1, 1, 5, 3), beta(1, 1, 1, 5, 0.5f);
  tensor<float> out(1, 1, 3, 5);
  attn::execution serial;
  compiled_layers<float>::layer_norm(sequence(x), sequence(out), {.gamma = vector(gamma), .beta = vector(beta)}, {},
                                     serial);
  CHECK(out == tensor<float>(1, 1, 3, 5, 0.5f));
}

// The rounding of the mean must not become the spread of a row that has none, or part of one of a last place.
TEMPLATE_LIST_TEST_CASE("layer_norm: rows whose numbers are nearly equal", "[layer_norm]", all_types) {
  using S = TestType;
  attn::execution serial;
  for (idx_t dim : {77, 384, 1024})
    for (double value : {0.1, 3.3, -100.1, 3.3e-3}) {
      CAPTURE(dim, value);
      const auto number = static_cast<real<S>>(static_cast<S>(static_cast<real<S>>(value)));
      const bool narrow = sizeof(S) < sizeof(real<S>);  // rounds a neighbour to the number itself
      const real<S> other = narrow ? number * real<S>(1.01) : std::nextafter(number, real<S>(1000));
      tensor<S> x(1, 1, 2, dim, static_cast<S>(number)), out(1, 1, 2, dim);
      for (idx_t d = 0; d < dim; d += 3) x(0, 0, 1, d) = static_cast<S>(other);
      compiled_layers<S>::layer_norm(sequence(x), sequence(out), {}, {.eps = real<S>(1e-12)}, serial);
      // By two values, a share of the numbers each: the mean of the reference is rounded as well.
      const double share = static_cast<double>((dim + 2) / 3) / static_cast<double>(dim);
      const double step = static_cast<double>(x(0, 0, 1, 0)) - static_cast<double>(x(0, 0, 1, 1));
      const double size = std::sqrt(step * step * share * (1 - share) + static_cast<double>(real<S>(1e-12)));
      for (idx_t d = 0; d < dim; ++d) {
        CHECK(std::abs(static_cast<double>(out(0, 0, 0, d))) <= 1e-6);
        const double expected = (d % 3 == 0 ? step * (1 - share) : -step * share) / size;
        const double error = std::abs(static_cast<double>(out(0, 0, 1, d)) - expected);
        if (!(error <= 4 * tolerance<S>::out)) FAIL_CHECK(error);
      }
    }
}

TEMPLATE_LIST_TEST_CASE("feed_forward: against the reference", "[feed_forward]", all_types) {
  for (attn::activation f : every_activation) {
    for (idx_t length : {0, 1, 3, 49, 100})
      for (idx_t hidden : {0, 1, 40, 130}) {
        CAPTURE(int(f), length, hidden);
        CHECK(feed_forward_error<TestType>(length, 24, hidden, 17, hidden % 4 == 0, f) <= tolerance<TestType>::out);
      }
    // more hidden numbers than one block
    CHECK(feed_forward_error<TestType>(50, 530, 1100, 33, true, f) <= tolerance<TestType>::out);
    CHECK(feed_forward_error<TestType>(2, 530, 1100, 33, true, f) <= tolerance<TestType>::out);
    // more than a block of few tokens
    CHECK(feed_forward_error<TestType>(3, 24, 130, 17, true, f, 33) <= tolerance<TestType>::out);
  }
}

TEMPLATE_LIST_TEST_CASE("feed_forward: gated, against the reference", "[feed_forward]", all_types) {
  // Two rounded factors where the tolerance is of one.
  constexpr double allowed = 2 * tolerance<TestType>::out;
  for (idx_t length : {0, 1, 3, 49, 100})
    for (idx_t hidden : {1, 40, 130}) {
      CAPTURE(length, hidden);
      const auto f = every_activation[static_cast<std::size_t>((length + hidden) % 7)];
      CHECK(feed_forward_error<TestType>(length, 24, hidden, 17, hidden % 4 == 0, f, 2, true) <= allowed);
    }
  for (idx_t length : {2, 50})
    CHECK(feed_forward_error<TestType>(length, 530, 1100, 33, true, attn::activation::silu, 2, true) <= allowed);
  CHECK(feed_forward_error<TestType>(3, 24, 130, 17, true, attn::activation::silu, 33, true) <= allowed);
}

TEMPLATE_LIST_TEST_CASE("feed_forward: in place", "[feed_forward]", exact_types) {
  const feed_forward_store<TestType> stored(random_feed_forward(20, 90, 20));
  tensor<TestType> x = cast<TestType>(random_sequence(1, 2, 60, 20)), out = x;
  attn::execution serial;
  compiled_layers<TestType>::feed_forward(sequence(std::as_const(x)), sequence(out), stored.views(),
                                          attn::activation::gelu, serial);
  compiled_layers<TestType>::feed_forward(sequence(std::as_const(x)), sequence(x), stored.views(),
                                          attn::activation::gelu, serial);
  CHECK(x == out);
}

TEMPLATE_LIST_TEST_CASE("project, feed_forward: scratch of few tokens does not grow with the batch", "[feed_forward]",
                        exact_types) {
  const feed_forward_store<TestType> stored(random_feed_forward(20, 90, 20));
  for (idx_t length : {1, 8}) {
    std::vector<std::size_t> scratch;
    for (idx_t batch : {48, 500}) {  // 48 rows are a block
      const tensor<TestType> x = cast<TestType>(random_sequence(1, batch, length, 20));
      tensor<TestType> out = x, up(batch, 1, length, 90);
      attn::execution projecting, feeding;
      compiled_layers<TestType>::project(sequence(x), sequence(up), {.weight = matrix(stored.up)}, projecting);
      compiled_layers<TestType>::feed_forward(sequence(x), sequence(out), stored.views(), attn::activation::gelu,
                                              feeding);
      scratch.push_back(projecting.scratch_bytes());
      scratch.push_back(feeding.scratch_bytes());
    }
    CHECK(scratch[0] == scratch[2]);
    CHECK(scratch[1] == scratch[3]);
  }
}

// Number by number, far into the tails: a few units in the last place, where the usual formulas keep no digit. The
// rounding of its exponent, which grows with it, shows in gelu_tanh; in gelu only without fused multiply-adds.
TEMPLATE_LIST_TEST_CASE("activations: every number is right", "[activation]", exact_types) {
  const double epsilon = static_cast<double>(std::numeric_limits<TestType>::epsilon());
  const double smallest = static_cast<double>(std::numeric_limits<TestType>::min());
#if defined(EIGEN_VECTORIZE_FMA) || defined(__ARM_FEATURE_FMA)
  constexpr double grows = 0;
#else
  constexpr double grows = 1;
#endif
  int wrong = 0;
  for (attn::activation f : every_activation)
    for (double x = -40; x <= 40; x += 0.03125 / 3) {
      const TestType at = static_cast<TestType>(x);
      const double exact = exactly(f, at), found = static_cast<double>(activated(f, at));
      const double exponent = f == attn::activation::gelu        ? grows * x * x / 2
                              : f == attn::activation::gelu_tanh ? std::max(0.0, -x * (1.6 + 0.0714 * x * x))
                                                                 : 0;
      if (std::abs(found - exact) <= (6 + 2 * exponent) * epsilon * std::abs(exact) + 100 * smallest) continue;
      CAPTURE(int(f), x, exact, found);
      CHECK(++wrong == 0);
    }
  CHECK(wrong == 0);
}

TEMPLATE_LIST_TEST_CASE("activations: the ends", "[activation]", exact_types) {
  constexpr TestType infinity = std::numeric_limits<TestType>::infinity();
  for (attn::activation f : every_activation) {
    CAPTURE(int(f));
    const bool bounded = f == attn::activation::tanh || f == attn::activation::sigmoid;
    const auto below = [&](TestType x) {
      return f == attn::activation::tanh ? TestType(-1) : f == attn::activation::identity ? x : TestType(0);
    };
    CHECK(activated(f, infinity) == (bounded ? TestType(1) : infinity));
    CHECK(activated(f, -infinity) == below(-infinity));
    CHECK(activated(f, TestType(-1e30)) == below(TestType(-1e30)));
    CHECK(activated(f, TestType(1e30)) == (bounded ? TestType(1) : TestType(1e30)));
    CHECK(activated(f, TestType(0)) == (f == attn::activation::sigmoid ? TestType(0.5) : TestType(0)));
    CHECK(std::isnan(activated(f, std::numeric_limits<TestType>::quiet_NaN())));
  }
}

}  // namespace testing::projection_tests
