// says: expected a vector, such as an Eigen::VectorXf or the column m.col(0)
#include <attn/layers/project.hpp>

void call(const Eigen::MatrixXf& x, Eigen::MatrixXf& out, const Eigen::MatrixXf& w, const Eigen::MatrixXf& b) {
#ifdef WRONG
  attn::project(x, out, {.weight = w, .bias = b});
#else
  attn::project(x, out, {.weight = w, .bias = b.col(0)});
#endif
}
