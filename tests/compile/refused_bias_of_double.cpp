// says: found numbers of another type
#include <attn/softmax/full_softmax.hpp>

#ifdef WRONG
using number = double;
#else
using number = float;
#endif

void call(const Eigen::MatrixXf& x, Eigen::MatrixXf& out, const attn::tensor_view<number>& bias) {
  attn::full_softmax(x, x, x, out, {.bias = bias});
}
