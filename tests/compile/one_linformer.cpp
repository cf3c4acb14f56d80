#include <attn/low_rank/linformer.hpp>

void attend(const Eigen::MatrixXf& q, const Eigen::MatrixXf& k, const Eigen::MatrixXf& v, Eigen::MatrixXf& out,
            const Eigen::MatrixXf& e) {
  attn::linformer(q, k, v, out, e, e);
}
