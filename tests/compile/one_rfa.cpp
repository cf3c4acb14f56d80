#include <attn/kernel/rfa.hpp>

void attend(const Eigen::MatrixXf& q, const Eigen::MatrixXf& k, const Eigen::MatrixXf& v, Eigen::MatrixXf& out) {
  attn::rfa(q, k, v, out, attn::draw_features<float>(256, q.cols()), {.causal = true});
}
