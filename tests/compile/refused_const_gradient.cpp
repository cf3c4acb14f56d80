// says: a gradient or result must be writable, but its elements are const
#include <attn/softmax/full_softmax_backward.hpp>

// A gradient is written: it cannot be a const matrix.
#ifdef WRONG
using matrix = const Eigen::MatrixXf;
#else
using matrix = Eigen::MatrixXf;
#endif

void call(const Eigen::MatrixXf& q, matrix& dq) { attn::full_softmax_backward(q, q, q, q, q, {.q = dq}); }
