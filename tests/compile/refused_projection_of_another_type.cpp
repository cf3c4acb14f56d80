// says: projections must have the element type of q
#include <attn/low_rank/linformer.hpp>

#ifdef WRONG
using projection = Eigen::MatrixXd;
#else
using projection = Eigen::MatrixXf;
#endif

void call(const Eigen::MatrixXf& q, const projection& e, Eigen::MatrixXf& out) { attn::linformer(q, q, q, out, e, e); }
