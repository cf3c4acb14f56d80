#include <attn/softmax/full_softmax.hpp>

void attend(const Eigen::MatrixXf& q, const Eigen::MatrixXf& k, const Eigen::MatrixXf& v, Eigen::MatrixXf& out) {
  attn::full_softmax(q, k, v, out);
}
