// says: expected the operator's own options for this element type, or an execution
#include <attn/layers/layer_norm.hpp>

#ifdef WRONG
using options = attn::layer_norm_options<double>;
#else
using options = attn::layer_norm_options<float>;
#endif

void call(const Eigen::MatrixXf& x, Eigen::MatrixXf& out, const options& o) { attn::layer_norm(x, out, {}, o); }
