#include <attn/low_rank/long_short.hpp>

void attend(const Eigen::MatrixXf& q, const Eigen::MatrixXf& k, const Eigen::MatrixXf& v, const Eigen::MatrixXf& logits,
            Eigen::MatrixXf& out) {
  attn::long_short(q, k, v, out, logits, {.left = 64, .right = 64});
}
