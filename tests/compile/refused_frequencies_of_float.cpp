// says first: frequencies of rotations are a list of double
#include <attn/core/rotary.hpp>

#include <vector>

#ifdef WRONG
using number = float;
#else
using number = double;
#endif

void call(Eigen::MatrixXf& x, const std::vector<number>& frequencies) {
  attn::rotary(x, x, {.frequencies = frequencies});
}
