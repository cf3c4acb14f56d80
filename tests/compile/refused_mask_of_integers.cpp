// says first: attn: a mask is a tensor_view, a tensor or an Eigen matrix of bool or std::uint8_t
#include <attn/softmax/full_softmax.hpp>

#ifdef WRONG
using flags = Eigen::MatrixXi;
#else
using flags = Eigen::Matrix<bool, Eigen::Dynamic, Eigen::Dynamic>;
#endif

void call(const Eigen::MatrixXf& q, Eigen::MatrixXf& out, const flags& mask) {
  attn::full_softmax(q, q, q, out, {.mask = mask});
}
