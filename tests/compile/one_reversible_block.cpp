#include <attn/layers/reversible_block.hpp>

void reverse(Eigen::MatrixXf& x) {
  const auto nothing = [](auto, auto, attn::execution&) {};
  attn::reversible_block(x, x, nothing, nothing);
  attn::reversible_block_inverse(x, x, nothing, nothing);
}
