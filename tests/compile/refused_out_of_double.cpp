// says first: q, k, v and out must have one element type
#include <attn/softmax/full_softmax.hpp>

#ifdef WRONG
using result = Eigen::MatrixXd;
#else
using result = Eigen::MatrixXf;
#endif

void call(const Eigen::MatrixXf& q, result& out) { attn::full_softmax(q, q, q, out); }
