// says first: attn::execution: threads need #include <attn/core/threads.hpp>
#include <attn/softmax/full_softmax.hpp>

#ifndef WRONG
#include <attn/core/threads.hpp>
#endif

void attend(const Eigen::MatrixXf& q, Eigen::MatrixXf& out) { attn::full_softmax(q, q, q, out, attn::execution(4)); }
