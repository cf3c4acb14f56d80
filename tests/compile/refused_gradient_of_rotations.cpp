// says: rotations
#include <attn/softmax/lsh_backward.hpp>

// What only chooses has no gradient.
#ifdef WRONG
#define WANTED .rotations
#else
#define WANTED .v
#endif

void call(const Eigen::MatrixXf& q, attn::tensor_view<float> d) { attn::lsh_backward(q, q, q, q, {WANTED = d}); }
