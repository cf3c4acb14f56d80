#include <attn/softmax/bigbird.hpp>

void attend(const Eigen::MatrixXf& q, const Eigen::MatrixXf& k, const Eigen::MatrixXf& v, Eigen::MatrixXf& out) {
  attn::bigbird(q, k, v, out, {.size = 64});
}
