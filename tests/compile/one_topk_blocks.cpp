#include <attn/softmax/topk_blocks.hpp>

void attend(const Eigen::MatrixXf& q, const Eigen::MatrixXf& k, const Eigen::MatrixXf& v, Eigen::MatrixXf& out) {
  attn::topk_blocks(q, k, v, out, {.block = 128, .topk = 3});
}
