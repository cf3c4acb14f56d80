// project_backward against the reverse pass of its reference.
#include "layers/gradients.hpp"

namespace testing::project_backward_tests {
namespace {

template <class S>
layer_backward_case<S> case_of(idx_t batch, idx_t length, idx_t inputs, idx_t outputs, bool bias, bool transposed) {
  layer_backward_case<S> c;
  auto& r = c.reference;
  r.name = "batch " + std::to_string(batch) + ", length " + std::to_string(length) + ", " + std::to_string(inputs) +
           " to " + std::to_string(outputs);
  add(r, "x", random_sequence(1, batch, length, inputs));
  add(r, "weight", random_weight(2, outputs, inputs));
  if (bias) add(r, "bias", random_vector(3, outputs));
  r.forward = [bias](const std::vector<tensor<variable>>& in) {
    return std::vector{reference::project(in[0], in[1], bias ? in[2] : tensor<variable>())};
  };
  c.run = [=](const std::vector<tensor<S>>& in, const tensor<S>& d_out, const std::vector<tensor<S>*>& g,
              bool accumulate, attn::execution& exec) {
    tensor<S> turned(1, 1, inputs, outputs);  // the weight by columns
    for (idx_t o = 0; o < outputs; ++o)
      for (idx_t i = 0; i < inputs; ++i) turned(0, 0, i, o) = in[1](0, 0, o, i);
    const in_matrix<S> weight =
        transposed ? in_matrix<S>{turned.data.data(), {outputs, inputs}, {1, outputs}} : matrix(in[1]);
    compiled_layers<S>::project_backward(
        sequence(in[0]), {.weight = weight, .bias = bias ? vector(in[2]) : in_vector<S>()}, sequence(d_out),
        {.x = sequence_or_none(g[0]),
         .weight = matrix_or_none(g[1]),
         .bias = bias ? vector_or_none(g[2]) : attn::tensor_view<S, 1>(),
         .accumulate = accumulate},
        exec);
  };
  return c;
}

// With one weight for each head.
template <class S>
layer_backward_case<S> case_of_heads(idx_t length, idx_t heads, idx_t inputs, idx_t outputs, bool bias) {
  layer_backward_case<S> c;
  auto& r = c.reference;
  r.name = std::to_string(heads) + " heads of " + std::to_string(inputs) + ", length " + std::to_string(length);
  add(r, "x", random_sequence(1, 2, length, heads * inputs));
  add(r, "weight", random_normal(2, 1, heads, outputs, inputs, 0.4));
  if (bias) add(r, "bias", random_vector(3, heads * outputs));
  r.forward = [bias](const std::vector<tensor<variable>>& in) {
    return std::vector{reference::project(in[0], in[1], bias ? in[2] : tensor<variable>())};
  };
  c.run = [=](const std::vector<tensor<S>>& in, const tensor<S>& d_out, const std::vector<tensor<S>*>& g,
              bool accumulate, attn::execution& exec) {
    attn::project_gradients<S> to{.x = sequence_or_none(g[0]), .accumulate = accumulate};
    if (g[1]) to.weight = {g[1]->data.data(), {heads, outputs, inputs}};
    if (bias) to.bias = vector_or_none(g[2]);
    compiled_layers<S>::project_backward(
        sequence(in[0]), {.weight = matrices(in[1]), .bias = bias ? vector(in[2]) : in_vector<S>()}, sequence(d_out),
        to, exec);
  };
  return c;
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("project_backward: one weight for each head", "[project_backward]", all_types) {
  for (idx_t length : {0, 1, 7, 65})
    for (idx_t heads : {1, 2, 6}) check_layer_backward(case_of_heads<TestType>(length, heads, 5, 4, heads == 2));
}

TEMPLATE_LIST_TEST_CASE("project_backward: against the reverse pass", "[project_backward]", all_types) {
  int n = 0;
  for (idx_t length : {0, 1, 2, 3, 7, 47, 65})
    for (idx_t inputs : {1, 13, 64})
      for (idx_t outputs : {2, 12, 35}) {
        ++n;
        check_layer_backward(case_of<TestType>(1 + n % 3, length, inputs, outputs, n % 2 == 0, n % 3 == 0));
      }
}

// Several chunks of tokens, blocks of weights and blocks of inputs.
TEMPLATE_LIST_TEST_CASE("project_backward: what is split", "[project_backward]", exact_types) {
  for (bool transposed : {false, true}) {
    check_layer_backward(case_of<TestType>(3, 700, 5, 8, true, transposed));
    check_layer_backward(case_of<TestType>(2, 240, 6, 9, false, transposed));
    check_layer_backward(case_of<TestType>(1, 9, 600, 5, true, transposed));
    check_layer_backward(case_of<TestType>(1, 9, 5, 600, true, transposed));
    check_layer_backward(case_of<TestType>(1, 60, 130, 101, true, transposed));
  }
}

TEST_CASE("project_backward: no features", "[project_backward]") {
  check_layer_backward(case_of<float>(2, 5, 0, 4, true, false));
  check_layer_backward(case_of<float>(2, 5, 4, 0, true, false));
  check_layer_backward(case_of<float>(0, 5, 4, 3, true, false));
}

TEST_CASE("project_backward: the reverse pass against central differences", "[project_backward]") {
  check_central_differences(case_of<float>(2, 7, 5, 4, true, false).reference);
}

TEST_CASE("project_backward: Eigen matrices and default arguments", "[project_backward]") {
  using matrix = Eigen::MatrixXf;
  const matrix x = matrix::Random(9, 6), w = matrix::Random(4, 6), d = matrix::Random(9, 4);
  const Eigen::VectorXf b = Eigen::VectorXf::Random(4);
  matrix dx(9, 6), dw(4, 6);
  Eigen::VectorXf db(4);
  attn::project_backward(x, {.weight = w, .bias = b}, d, {.x = dx, .weight = dw, .bias = db});
  CHECK((dx - d * w).norm() < 1e-5f);
  CHECK((dw - d.transpose() * x).norm() < 1e-5f);
  CHECK((db - d.colwise().sum().transpose()).norm() < 1e-5f);
  const matrix before = dw;
  attn::project_backward(x, {.weight = w}, d, {.weight = dw, .accumulate = true}, attn::execution(2, 0));
  CHECK(dw == 2 * before);
}

}  // namespace testing::project_backward_tests
