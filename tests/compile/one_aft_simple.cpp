#include <attn/aft/aft_simple.hpp>

void mix(const Eigen::MatrixXf& q, const Eigen::MatrixXf& k, const Eigen::MatrixXf& v, Eigen::MatrixXf& out) {
  attn::aft_simple(q, k, v, out);
}
