// says: elements must be float, double, Eigen::half or Eigen::bfloat16
#include <attn/softmax/sliding_window.hpp>

#ifdef WRONG
using matrix = Eigen::MatrixXi;
#else
using matrix = Eigen::MatrixXf;
#endif

void call(const matrix& q, matrix& out) { attn::sliding_window(q, q, q, out); }
