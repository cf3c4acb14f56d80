// says: an Eigen expression such as x * w has no memory of its own: evaluate it first
#include <attn/layers/layer_norm.hpp>

void call(const Eigen::MatrixXf& x, const Eigen::MatrixXf& w, Eigen::MatrixXf& out) {
#ifdef WRONG
  attn::layer_norm(x * w, out);
#else
  attn::layer_norm((x * w).eval(), out);
#endif
}
