// says: q, k, v and out must have one element type
#include <attn/softmax/sliding_window.hpp>

#ifdef WRONG
using values = Eigen::MatrixXd;
#else
using values = Eigen::MatrixXf;
#endif

void call(const Eigen::MatrixXf& q, const values& v, Eigen::MatrixXf& out) { attn::sliding_window(q, q, v, out); }
