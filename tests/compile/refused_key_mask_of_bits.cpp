// says first: attn: a mask is a tensor_view, a tensor or an Eigen matrix of bool or std::uint8_t
#include <attn/softmax/full_softmax.hpp>

#include <vector>

#ifdef WRONG
using flag = bool;
#else
using flag = std::uint8_t;
#endif

void call(const Eigen::MatrixXf& q, Eigen::MatrixXf& out, const std::vector<flag>& key_mask) {
  attn::full_softmax(q, q, q, out, {.key_mask = key_mask});
}
