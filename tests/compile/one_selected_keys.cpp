#include <attn/softmax/selected_keys.hpp>

void attend(const Eigen::MatrixXf& q, const Eigen::MatrixXf& k, const Eigen::MatrixXf& v, const Eigen::MatrixXi& lists,
            Eigen::MatrixXf& out) {
  attn::selected_keys(q, k, v, out, lists, {.causal = true});
}
