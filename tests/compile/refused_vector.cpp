// says: a list of numbers has no shape: pass attn::tensor_view<float>(list.data(), {batch, heads, length, dim})
#include <attn/layers/layer_norm.hpp>

#include <vector>

void call(const std::vector<float>& x, Eigen::MatrixXf& out) {
#ifdef WRONG
  attn::layer_norm(x, out);
#else
  attn::layer_norm(attn::tensor_view<const float, 3>(x.data(), {1, out.rows(), out.cols()}), out);
#endif
}
