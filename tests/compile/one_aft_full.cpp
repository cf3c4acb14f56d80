#include <attn/aft/aft_full.hpp>

void mix(const Eigen::MatrixXf& q, const Eigen::MatrixXf& k, const Eigen::MatrixXf& v, Eigen::MatrixXf& out,
         const Eigen::MatrixXf& w) {
  attn::aft_full(q, k, v, out, w);
}
