// says: the gradients of pointwise with a function f need its derivative
#include <attn/softmax/pointwise_backward.hpp>

const auto f = [](float s) { return s; };
#ifdef WRONG
void call(const Eigen::MatrixXf& q, Eigen::MatrixXf& dq) { attn::pointwise_backward(q, q, q, q, {.q = dq}, {}, f); }
#else
const auto derivative = [](float) { return 1.0f; };
void call(const Eigen::MatrixXf& q, Eigen::MatrixXf& dq) {
  attn::pointwise_backward(q, q, q, q, {.q = dq}, {}, f, derivative);
}
#endif
