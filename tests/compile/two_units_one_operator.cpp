// One operator and no header of threads: executions are made here and used by the other units, and the other way round.
#include <attn/softmax/full_softmax.hpp>

void attend(const Eigen::MatrixXf& x, Eigen::MatrixXf& out, attn::execution& exec) {
  attn::full_softmax(x, x, x, out, exec);
}

attn::execution make_serial() { return {}; }
