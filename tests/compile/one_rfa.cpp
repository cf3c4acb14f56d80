#include <attn/kernel/rfa.hpp>

void attend(const Eigen::MatrixXf& q, const Eigen::MatrixXf& k, const Eigen::MatrixXf& v, Eigen::MatrixXf& out,
            const Eigen::MatrixXf& features) {
  attn::rfa(q, k, v, out, features, {.causal = true});
}
