// says: an Eigen expression such as x * w has no memory of its own: evaluate it first
#include <attn/layers/project.hpp>

void call(const Eigen::MatrixXf& x, Eigen::MatrixXf& out, const Eigen::MatrixXf& w) {
  const Eigen::MatrixXf scaled = 2 * w;
#ifdef WRONG
  attn::project(x, out, {.weight = 2 * w});
#else
  attn::project(x, out, {.weight = scaled});
#endif
}
