// says: w must have the element type of q, k, v and out
#include <attn/aft/aft_full.hpp>

#ifdef WRONG
using biases = Eigen::MatrixXd;
#else
using biases = Eigen::MatrixXf;
#endif

void call(const Eigen::MatrixXf& x, const biases& w, Eigen::MatrixXf& out) { attn::aft_full(x, x, x, out, w); }
