// One program for every processor: one_binary/attend.cpp is compiled for several levels of processors, and each call goes to
// the best one that this processor has. ATTN_DISPATCH_LEVEL=x86-64 in the environment names another one.
//
//   add_executable(program 24_one_binary.cpp)
//   target_link_libraries(program PRIVATE attn::attn)
//   attn_dispatch(program one_binary/attend.cpp LEVELS x86-64 x86-64-v3 x86-64-v4)
#include "one_binary/attend.hpp"

#include <chrono>
#include <cmath>
#include <cstdio>
#include <exception>
#include <vector>

// Softmax attention of one head in plain loops; the sum of squares of what `out` differs by, and of the result.
static void compare(const float* q, const float* k, const float* v, const float* out, attend_shape shape, double& error,
                    double& norm) {
  std::vector<double> sum(std::size_t(shape.dim));
  for (std::ptrdiff_t i = 0; i < shape.length; ++i) {
    double total = 0;
    for (double& x : sum) x = 0;
    for (std::ptrdiff_t j = 0; j <= i; ++j) {
      double s = 0;
      for (std::ptrdiff_t d = 0; d < shape.dim; ++d) s += double(q[i * shape.dim + d]) * double(k[j * shape.dim + d]);
      const double weight = std::exp(s / std::sqrt(double(shape.dim)));
      total += weight;
      for (std::ptrdiff_t d = 0; d < shape.dim; ++d) sum[std::size_t(d)] += weight * double(v[j * shape.dim + d]);
    }
    for (std::ptrdiff_t d = 0; d < shape.dim; ++d) {
      const double expected = sum[std::size_t(d)] / total;
      error += std::pow(double(out[i * shape.dim + d]) - expected, 2);
      norm += expected * expected;
    }
  }
}

int main() try {
  const attend_shape shape{.heads = 4, .length = 300, .dim = 64};
  const std::ptrdiff_t head = shape.length * shape.dim, count = shape.heads * head;
  std::vector<float> q, k, v, out(std::size_t(count), 0.f);
  for (std::ptrdiff_t n = 0; n < count; ++n) {
    const auto x = float(n);
    q.push_back(std::sin(x)), k.push_back(std::cos(3 * x)), v.push_back(std::sin(5 * x));
  }
  attend(q.data(), k.data(), v.data(), out.data(), shape);
  const auto start = std::chrono::steady_clock::now();
  attend(q.data(), k.data(), v.data(), out.data(), shape);
  const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;

  double error = 0, norm = 0;
  for (std::ptrdiff_t n = 0; n < count; n += head)
    compare(q.data() + n, k.data() + n, v.data() + n, out.data() + n, shape, error, norm);
  error = std::sqrt(error / norm);
  std::printf("level %s: %.2f ms, error %.1e\n", attend_level(), time.count(), error);
  return error < 1e-6 ? 0 : 1;
} catch (const std::exception& problem) {  // on a processor that has none of the levels
  std::fprintf(stderr, "%s\n", problem.what());
  return 1;
}
