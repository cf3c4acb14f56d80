#include <attn/layers/encoder_block.hpp>

void encode(Eigen::MatrixXf& x, const Eigen::MatrixXf& u, const Eigen::MatrixXf& d) {
  attn::encoder_block(x, x, {.feed_forward = {.up = u, .down = d}}, [](auto, auto, attn::execution&) {});
}
