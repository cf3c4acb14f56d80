// says: expected the layer's own weights, of the element type of x
#include <attn/layers/feed_forward.hpp>

#ifdef WRONG
using weights = attn::feed_forward_weights<double>;
#else
using weights = attn::feed_forward_weights<float>;
#endif

void call(const Eigen::MatrixXf& x, Eigen::MatrixXf& out, const weights& w) { attn::feed_forward(x, out, w); }
