// says: score must be callable as score(s, batch, head, i, j)
#include <attn/softmax/full_softmax.hpp>

#ifdef WRONG
const auto score = [](float s) { return s; };
#else
const auto score = [](float s, attn::idx_t, attn::idx_t, attn::idx_t, attn::idx_t) { return s; };
#endif

void call(const Eigen::MatrixXf& q, Eigen::MatrixXf& out) { attn::full_softmax(q, q, q, out, {}, score); }
