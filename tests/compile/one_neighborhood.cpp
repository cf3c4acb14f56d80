#include <attn/softmax/neighborhood.hpp>

void attend(const Eigen::MatrixXf& q, const Eigen::MatrixXf& k, const Eigen::MatrixXf& v, Eigen::MatrixXf& out) {
  attn::neighborhood(q, k, v, out, {.grid = {64, 64}, .kernel = {13, 13}});
}
