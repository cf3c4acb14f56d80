// says: projections must be [heads or 1, rank, length]
#include <attn/low_rank/linformer.hpp>

#ifdef WRONG
using projection = attn::tensor_view<const float>;
#else
using projection = attn::tensor_view<const float, 3>;
#endif

void call(const Eigen::MatrixXf& q, const projection& e, Eigen::MatrixXf& out) { attn::linformer(q, q, q, out, e, e); }
