// says: a temporary is gone before the view of it is read: name the matrix or list
#include <attn/layers/project.hpp>

attn::project_weights<float> weights_of(const Eigen::MatrixXf& w, Eigen::MatrixXf& memory) {
#ifdef WRONG
  return {.weight = (2 * w).eval()};
#else
  memory = 2 * w;
  return {.weight = memory};
#endif
}
