#include <attn/softmax/block.hpp>

void attend(const Eigen::MatrixXf& q, const Eigen::MatrixXf& k, const Eigen::MatrixXf& v, Eigen::MatrixXf& out) {
  attn::block(q, k, v, out, {.size = 128});
}
