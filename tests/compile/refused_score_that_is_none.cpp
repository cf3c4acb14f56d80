// says: score must be callable as score(s, batch, head, i, j)
#include <attn/softmax/sliding_window.hpp>

#ifdef WRONG
const float score = 1;
#else
const auto score = [](float s, attn::idx_t, attn::idx_t, attn::idx_t, attn::idx_t) { return s; };
#endif

void call(const Eigen::MatrixXf& q, Eigen::MatrixXf& out) { attn::sliding_window(q, q, q, out, {}, score); }
