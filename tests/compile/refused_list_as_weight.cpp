// says: a list of numbers has no shape: pass attn::tensor_view<float, 2>(list.data(), {rows, columns})
#include <attn/layers/project.hpp>

#include <vector>

void call(const Eigen::MatrixXf& x, Eigen::MatrixXf& out, const std::vector<float>& w) {
#ifdef WRONG
  attn::project(x, out, {.weight = w});
#else
  attn::project(x, out, {.weight = attn::tensor_view<const float, 2>(w.data(), {out.cols(), x.cols()})});
#endif
}
