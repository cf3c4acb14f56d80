#include <attn/low_rank/multipole.hpp>

void attend(const Eigen::MatrixXf& q, const Eigen::MatrixXf& k, const Eigen::MatrixXf& v, Eigen::MatrixXf& out) {
  attn::multipole(q, k, v, out, {.exact = 128});
}
