#include <attn/kernel/performer.hpp>

void attend(const Eigen::MatrixXf& q, const Eigen::MatrixXf& k, const Eigen::MatrixXf& v, Eigen::MatrixXf& out,
            const Eigen::MatrixXf& features) {
  attn::performer(q, k, v, out, features, {.causal = true});
}
