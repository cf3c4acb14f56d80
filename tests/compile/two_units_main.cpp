// This unit and another one include and use everything: whatever is defined twice would not link. A third one has no
// header of threads; executions are of one type in all.
#include <attn/attn.hpp>

#include <cstdio>

float first_weight(const Eigen::MatrixXf& x);
void attend(const Eigen::MatrixXf& x, Eigen::MatrixXf& out, attn::execution& exec);
attn::execution make_serial();

int main() {
  const Eigen::MatrixXf x = Eigen::MatrixXf::Identity(4, 4);
  Eigen::MatrixXf out(4, 4), by_threads(4, 4), by_one(4, 4);
  attn::execution threads(3, 0), serial = make_serial();
  attn::full_softmax(x, x, x, out, threads);
  attend(x, by_threads, threads);
  attn::full_softmax(x, x, x, by_one, serial);
  std::printf("%g %g\n", static_cast<double>(out(0, 0)), static_cast<double>(first_weight(x)));
  return out(0, 0) == first_weight(x) && by_threads == out && by_one == out ? 0 : 1;
}
