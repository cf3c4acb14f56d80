// says: q, k, v and out must have one element type
#include <attn/softmax/full_softmax.hpp>

#ifdef WRONG
using values = Eigen::MatrixXd;
#else
using values = Eigen::MatrixXf;
#endif

void call(const Eigen::MatrixXf& q, const values& v, Eigen::MatrixXf& out) { attn::full_softmax(q, q, v, out); }
