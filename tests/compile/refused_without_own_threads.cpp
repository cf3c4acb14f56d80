// says first: attn::execution: threads need #include <attn/core/threads.hpp>
#include <attn/softmax/full_softmax.hpp>

#ifndef WRONG
#include <attn/core/threads.hpp>
#endif

void attend(const Eigen::MatrixXf& q, Eigen::MatrixXf& out) {
  attn::execution own(4, [](int count, auto task) {
    for (int n = 0; n < count; ++n) task(n);
  });
  attn::full_softmax(q, q, q, out, own);
}
