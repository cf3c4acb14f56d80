// says: elements must be float, double, Eigen::half or Eigen::bfloat16
#include <attn/softmax/full_softmax.hpp>

#ifdef WRONG
using matrix = Eigen::MatrixXi;
#else
using matrix = Eigen::MatrixXf;
#endif

void call(const matrix& q, matrix& out) { attn::full_softmax(q, q, q, out); }
