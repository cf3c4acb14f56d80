// says: score_backward without a score function
#include <attn/softmax/full_softmax_backward.hpp>

const auto backward = [](float, float d, attn::idx_t, attn::idx_t, attn::idx_t, attn::idx_t) { return d; };
#ifdef WRONG
void call(const Eigen::MatrixXf& q, Eigen::MatrixXf& dq) {
  attn::full_softmax_backward(q, q, q, q, q, {.q = dq}, {}, {}, backward);
}
#else
const auto score = [](float s, attn::idx_t, attn::idx_t, attn::idx_t, attn::idx_t) { return s; };
void call(const Eigen::MatrixXf& q, Eigen::MatrixXf& dq) {
  attn::full_softmax_backward(q, q, q, q, q, {.q = dq}, {}, score, backward);
}
#endif
