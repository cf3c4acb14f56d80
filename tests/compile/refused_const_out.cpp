// says: out must be writable
#include <attn/softmax/full_softmax.hpp>

#ifdef WRONG
using result = const Eigen::MatrixXf;
#else
using result = Eigen::MatrixXf;
#endif

void call(const Eigen::MatrixXf& q, result& out) { attn::full_softmax(q, q, q, out); }
