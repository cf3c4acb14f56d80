#include <attn/layers/multi_head.hpp>

void attend(const Eigen::MatrixXf& x, const Eigen::MatrixXf& w, Eigen::MatrixXf& out) {
  attn::multi_head(x, out, {.query = w, .key = w, .value = w, .output = w}, [](auto, auto, auto, auto, auto&) {},
                   {.heads = 4});
}
