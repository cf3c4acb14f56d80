// Vectors in inline functions, in static objects and in those of each thread.
#include "kernels.hpp"

#include <iostream>
#include <stdexcept>
#include <vector>

struct squares {
  std::vector<float> of(const float* x, std::ptrdiff_t count) const {
    std::vector<float> y(x, x + count);
    for (float& each : y) each *= each;
    return y;
  }
};
inline int& number_of_calls() {
  static int number = 0;
  return number;
}
template <class T>
[[gnu::noinline]] T sum(const std::vector<T>& x) {
  T total = 0;
  for (T each : x) total += each;
  return total;
}
inline const std::vector<float> table = [] {  // by vectors, before the program begins
  std::vector<float> x(100);
  for (std::size_t n = 0; n < x.size(); ++n) x[n] = float(n) * float(n);
  return x;
}();
static const struct last {
  ~last() { std::cout << "ended at " << ATTN_DISPATCH_LEVEL << " after " << sum(table) << std::endl; }
} last;
inline thread_local std::vector<float> scratch(16, 0.25f);

const char* kernels::level() { return ATTN_DISPATCH_LEVEL; }
int kernels::calls() { return number_of_calls(); }
float kernels::sum_of_squares(const float* x, std::ptrdiff_t count) {
  ++number_of_calls();
  if (count < 0) throw std::invalid_argument("expected count >= 0");
  if (count == 0) throw own_error{7};
  return sum(squares().of(x, count)) + sum(scratch) - 4;
}
