#include <attn/fourier/fnet.hpp>

void mix(const Eigen::MatrixXf& x, Eigen::MatrixXf& out) { attn::fnet(x, out); }
