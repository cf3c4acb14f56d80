// says: the gradient of a score function needs its derivative
#include <attn/softmax/full_softmax_backward.hpp>

const auto score = [](float s, attn::idx_t, attn::idx_t, attn::idx_t, attn::idx_t) { return s; };
#ifdef WRONG
void call(const Eigen::MatrixXf& q, Eigen::MatrixXf& dq) {
  attn::full_softmax_backward(q, q, q, q, q, {.q = dq}, {}, score);
}
#else
const auto backward = [](float, float d, attn::idx_t, attn::idx_t, attn::idx_t, attn::idx_t) { return d; };
void call(const Eigen::MatrixXf& q, Eigen::MatrixXf& dq) {
  attn::full_softmax_backward(q, q, q, q, q, {.q = dq}, {}, score, backward);
}
#endif
