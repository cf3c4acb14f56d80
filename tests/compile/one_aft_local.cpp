#include <attn/aft/aft_local.hpp>

void mix(const Eigen::MatrixXf& q, const Eigen::MatrixXf& k, const Eigen::MatrixXf& v, Eigen::MatrixXf& out,
         const Eigen::MatrixXf& w) {
  attn::aft_local(q, k, v, out, w);
}
