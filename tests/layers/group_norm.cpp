// group_norm and its backward pass against their reference.
#include "layers/group_norm.hpp"

namespace testing::group_norm_tests {
namespace {

template <class S>
double error_of(group_norm_problem p) {
  for (tensor<double>* x : {&p.x, &p.gamma, &p.beta}) *x = rounded<S>(*x);
  attn::execution serial;
  const auto wanted = reference::group_norm(p.x, p.gamma, p.beta, p.heads, p.stored_eps<S>());
  return relative_error(group_norm_of<S>(p, serial), wanted);
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("group_norm: against the reference", "[group_norm]", all_types) {
  for (idx_t length : {0, 1, 65})
    for (idx_t dim : {0, 1, 3, 16, 33, 64})
      for (idx_t heads : {1, 2, 5}) {
        CAPTURE(length, dim, heads);
        CHECK(error_of<TestType>(random_group_norm(2, length, heads, dim, dim != 16)) <= tolerance<TestType>::out);
      }
}

TEMPLATE_LIST_TEST_CASE("group_norm: of one head it is layer_norm, to the last bit", "[group_norm]", exact_types) {
  using S = TestType;
  const auto p = random_group_norm(2, 70, 1, 33, true);
  const tensor<S> x = cast<S>(p.x), gamma = cast<S>(p.gamma), beta = cast<S>(p.beta);
  tensor<S> out = x;
  attn::execution serial;
  compiled_layers<S>::layer_norm(sequence(x), sequence(out), {.gamma = vector(gamma), .beta = vector(beta)}, {},
                                 serial);
  CHECK(group_norm_of<S>(p, serial) == out);
}

// Neither its mean nor its size is that of the head beside it, nor does a NaN there matter.
TEST_CASE("group_norm: heads without spread, of any size, beside NaN", "[group_norm]") {
  const idx_t dim = 40;
  auto p = random_group_norm(1, 3, 4, dim, true);
  for (idx_t i = 0; i < 3; ++i)
    for (idx_t d = 0; d < dim; ++d) {
      p.x(0, 0, i, d) = 3.3;                         // becomes beta
      p.x(0, 0, i, dim + d) *= 1e30;                 // its squares overflow
      p.x(0, 0, i, 2 * dim + d) += 1000;
      p.x(0, 0, i, 3 * dim + d) = std::nan("");
    }
  p = {rounded<float>(p.x), rounded<float>(p.gamma), rounded<float>(p.beta), 4};
  attn::execution serial;
  const auto out = group_norm_of<float>(p, serial);
  const auto wanted = reference::group_norm(p.x, p.gamma, p.beta, 4, p.stored_eps<float>());
  for (idx_t i = 0; i < 3; ++i)
    for (idx_t d = 0; d < dim; ++d) {
      CHECK(out(0, 0, i, d) == static_cast<float>(p.beta(0, 0, 0, d)));
      CHECK(std::abs(static_cast<double>(out(0, 0, i, dim + d)) - wanted(0, 0, i, dim + d)) <= 1e-5);
      CHECK(std::abs(static_cast<double>(out(0, 0, i, 2 * dim + d)) - wanted(0, 0, i, 2 * dim + d)) <= 1e-3);
      CHECK(std::isnan(out(0, 0, i, 3 * dim + d)));
    }
}

TEST_CASE("group_norm: Eigen matrices, default arguments, in place", "[group_norm]") {
  Eigen::MatrixXf x = Eigen::MatrixXf::Random(9, 6), out(9, 6), dx(9, 6), other(9, 6);
  const Eigen::VectorXf g = Eigen::VectorXf::Constant(6, 2.0f);
  attn::execution threads(2, 0);
  attn::group_norm(x, out, {}, {.heads = 2});
  CHECK(out.leftCols(3).rowwise().sum().norm() < 1e-4f);
  CHECK(out.rightCols(3).rowwise().sum().norm() < 1e-4f);
  attn::group_norm(x, other, {.gamma = g}, {.heads = 2}, threads);
  CHECK((other - 2 * out).norm() < 1e-4f);
  attn::group_norm_backward(x, {.gamma = g}, out, {.x = dx}, {.heads = 2});
  attn::group_norm_backward(x, {.gamma = g}, out, {.x = other}, {.heads = 2}, threads);
  CHECK(dx == other);
  CHECK(dx.leftCols(3).rowwise().sum().norm() < 1e-4f);  // a shift of a head changes nothing
  attn::group_norm(x, x, {}, {.heads = 2}, attn::execution(2));
  CHECK(x == out);
}

TEMPLATE_LIST_TEST_CASE("group_norm_backward: against the reverse pass", "[group_norm]", all_types) {
  for (idx_t length : {0, 1, 65, 130})
    for (idx_t dim : {5, 8, 33})
      check_layer_backward(case_of<TestType>(random_group_norm(1 + length % 3, length, 3, dim, dim != 5)));
  auto p = random_group_norm(2, 20, 2, 16, true);
  p.beta = {}, p.eps = 0.5;
  check_layer_backward(case_of<TestType>(p));
  check_layer_backward(case_of<TestType>(random_group_norm(2, 20, 4, 0, true)));
}

TEST_CASE("group_norm_backward: the reverse pass against central differences", "[group_norm]") {
  check_central_differences(case_of<float>(random_group_norm(2, 3, 2, 5, true)).reference);
}

}  // namespace testing::group_norm_tests
