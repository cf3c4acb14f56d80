// layer_norm_backward against the reverse pass of its reference.
#include "layers/gradients.hpp"

namespace testing::layer_norm_backward_tests {
namespace {

template <class S>
layer_backward_case<S> case_of(idx_t batch, idx_t length, idx_t dim, bool gamma, bool beta, double eps = 1e-5,
                               bool rms = false, double size = 1) {
  layer_backward_case<S> c;
  auto& r = c.reference;
  r.name = "batch " + std::to_string(batch) + ", length " + std::to_string(length) + ", dim " + std::to_string(dim);
  tensor<double> x_of_size = random_sequence(1, batch, length, dim);
  for (double& value : x_of_size.data) value *= size;
  add(r, "x", x_of_size);
  if (gamma) add(r, "gamma", random_vector(2, dim, 1));
  if (beta) add(r, "beta", random_vector(3, dim));
  const double stored_eps = static_cast<double>(static_cast<real<S>>(eps));
  r.forward = [=](const std::vector<tensor<variable>>& in) {
    next_of<tensor<variable>> next(in);
    const auto x = next(), g = next(gamma), b = next(beta);
    return std::vector{rms ? reference::rms_norm(x, g, stored_eps) : reference::layer_norm(x, g, b, stored_eps)};
  };
  c.run = [=](const std::vector<tensor<S>>& in, const tensor<S>& d_out, const std::vector<tensor<S>*>& to,
              bool accumulate, attn::execution& exec) {
    if (rms) {
      attn::rms_norm_weights<S> w;
      if (gamma) w.gamma = vector(in[1]);
      attn::rms_norm_gradients<S> g{.x = sequence_or_none(to[0]), .accumulate = accumulate};
      if (gamma) g.gamma = vector_or_none(to[1]);
      return compiled_layers<S>::rms_norm_backward(sequence(in[0]), w, sequence(d_out), g,
                                                   {.eps = static_cast<real<S>>(eps)}, exec);
    }
    const tensor<S> none;
    attn::layer_norm_weights<S> w;
    if (gamma) w.gamma = vector(in[1]);
    if (beta) w.beta = vector(in.back());
    attn::layer_norm_gradients<S> g{.x = sequence_or_none(to[0]), .accumulate = accumulate};
    if (gamma) g.gamma = vector_or_none(to[1]);
    if (beta) g.beta = vector_or_none(to.back());
    compiled_layers<S>::layer_norm_backward(sequence(in[0]), w, sequence(d_out), g, {.eps = static_cast<real<S>>(eps)},
                                            exec);
  };
  return c;
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("layer_norm_backward: against the reverse pass", "[layer_norm_backward]", all_types) {
  for (idx_t length : {0, 1, 7, 65, 130})
    for (idx_t dim : {5, 8, 33, 80})  // of two features a norm keeps the sign alone: the gradient of x cancels
      for (int given : {0, 1, 2, 3})
        check_layer_backward(case_of<TestType>(1 + length % 3, length, dim, given & 1, given & 2));
}

TEMPLATE_LIST_TEST_CASE("layer_norm_backward: a large eps, one feature, none", "[layer_norm_backward]", exact_types) {
  check_layer_backward(case_of<TestType>(2, 20, 16, true, true, 0.5));
  check_layer_backward(case_of<TestType>(2, 20, 1, true, true));
  check_layer_backward(case_of<TestType>(2, 20, 0, true, true));
}

TEST_CASE("norms, backward: rows whose squares leave the range of float", "[layer_norm_backward]") {
  for (double size : {1e-30, 1e-20, 1e19, 1e30})
    for (bool rms : {false, true})
      for (idx_t dim : {7, 80}) check_layer_backward(case_of<float>(2, 20, dim, true, !rms, 1e-5, rms, size));
}

TEMPLATE_LIST_TEST_CASE("rms_norm_backward: against the reverse pass", "[layer_norm_backward]", all_types) {
  for (idx_t length : {0, 1, 65, 130})
    for (idx_t dim : {5, 8, 33})
      check_layer_backward(case_of<TestType>(1 + length % 3, length, dim, dim != 8, false, 1e-5, true));
  check_layer_backward(case_of<TestType>(2, 20, 16, true, false, 0.5, true));
  check_layer_backward(case_of<TestType>(2, 20, 0, true, false, 1e-5, true));
  check_central_differences(case_of<float>(2, 7, 5, true, false, 1e-5, true).reference);
}

// Where d_out is the same for all features, too, the gradient is 0: r = 1e6 must not multiply the rounding of a mean.
TEST_CASE("layer_norm_backward: rows whose numbers are equal", "[layer_norm_backward]") {
  attn::execution serial;
  for (idx_t dim : {77, 384}) {
    tensor<float> x(1, 1, 3, dim, 3.3f), d_out(1, 1, 3, dim, 0.3f), gamma(1, 1, 1, dim, 1.1f), dx = x, d_gamma = gamma;
    compiled_layers<float>::layer_norm_backward(sequence(x), {.gamma = vector(gamma)}, sequence(d_out),
                                                {.x = sequence(dx), .gamma = vector_or_none(&d_gamma)},
                                                {.eps = 1e-12f}, serial);
    for (float d : dx.data) CHECK(std::abs(d) <= 1e-2f);  // 1e-8 r
    for (float d : d_gamma.data) CHECK(std::abs(d) <= 1e-6f);
  }
}

// Sums over so many equal terms err by no more than those of a task.
TEST_CASE("layer_norm_backward: long sequences", "[layer_norm_backward]") {
  constexpr idx_t length = 262144;
  tensor<float> x(1, 1, length, 2, 1), d_out(1, 1, length, 2, 0.7f), gamma(1, 1, 1, 2, 1);
  tensor<float> d_gamma = gamma, d_beta = gamma;
  for (idx_t t = 0; t < length; ++t) x(0, 0, t, 1) = -1;
  attn::execution serial;
  compiled_layers<float>::layer_norm_backward(
      sequence(x), {.gamma = vector(gamma), .beta = vector(gamma)}, sequence(d_out),
      {.gamma = vector_or_none(&d_gamma), .beta = vector_or_none(&d_beta)}, {.eps = 0}, serial);
  for (float d : d_beta.data) CHECK(std::abs(d / (0.7f * length) - 1) <= 4e-6f);
  CHECK(std::abs(d_gamma(0, 0, 0, 0) / (0.7f * length) - 1) <= 4e-6f);
  CHECK(std::abs(d_gamma(0, 0, 0, 1) / (0.7f * length) + 1) <= 4e-6f);
}

TEST_CASE("layer_norm_backward: the reverse pass against central differences", "[layer_norm_backward]") {
  check_central_differences(case_of<float>(2, 7, 5, true, true).reference);
}

TEST_CASE("layer_norm_backward: Eigen matrices and default arguments", "[layer_norm_backward]") {
  const Eigen::MatrixXf x = Eigen::MatrixXf::Random(9, 6), d = Eigen::MatrixXf::Random(9, 6);
  const Eigen::VectorXf g = Eigen::VectorXf::Random(6);
  Eigen::MatrixXf dx(9, 6), other(9, 6);
  Eigen::VectorXf dg(6);
  attn::layer_norm_backward(x, {}, d, {.x = dx});
  CHECK(dx.rowwise().sum().norm() < 1e-5f);  // a shift of a row changes nothing
  attn::execution threads(2, 0);
  attn::layer_norm_backward(x, {.gamma = g}, d, {.x = dx, .gamma = dg}, threads);
  attn::layer_norm_backward(x, {.gamma = g}, d, {.x = other}, {.eps = 1e-5f}, attn::execution(2));
  CHECK(dx == other);
}

}  // namespace testing::layer_norm_backward_tests
