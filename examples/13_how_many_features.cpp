// How many random features does Performer need for a given error? Once it is small, the error falls as 1 /
// sqrt(features), with a factor that grows with the norms of queries and keys: measure it once, on data like yours.
// And what redrawing the features changes: the part of the error that is chance, which the mean of several drawings
// loses. What is left is the chance of 16 draws, and the error of a quotient of two estimates.
#include <attn/kernel/performer.hpp>
#include <attn/softmax/full_softmax.hpp>

#include <cmath>
#include <cstdint>
#include <cstdio>

using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// Normal numbers of the library: a seed gives the same numbers everywhere.
matrix draw(attn::idx_t rows, attn::idx_t cols, float size, std::uint64_t seed) {
  attn::random_numbers numbers(seed);
  return matrix::NullaryExpr(rows, cols, [&] { return size * float(numbers.normal()); });
}

int main() {
  const attn::idx_t length = 1024, dim = 64;
  const double wanted = 0.1;
  const matrix k0 = draw(length, dim, 1, 1), q0 = draw(length, dim, 1, 2), v = draw(length, dim, 1, 3).array() + 0.5f;
  std::printf("relative error against softmax, mean of 4 drawings\n%10s", "|q|, |k|");
  for (attn::idx_t count = 32; count <= 2048; count *= 4) std::printf("%8td", count);
  std::printf("  features for an error of %.2f\n", wanted);
  bool right = true;

  for (float size : {0.25f, 0.35f, 0.5f, 0.7f}) {
    const matrix q = size * q0, k = size * k0;
    matrix exact(length, dim), out(length, dim);
    attn::full_softmax(q, k, v, exact);
    const auto error = [&](attn::idx_t count) {
      double sum = 0;
      for (std::uint64_t seed = 1; seed <= 4; ++seed) {
        attn::performer(q, k, v, out, attn::draw_features<float>(count, dim, {.seed = seed}));
        sum += (out - exact).norm() / exact.norm() / 4;
      }
      return sum;
    };
    std::printf("%10.1f", size * std::sqrt(double(dim)));
    double first = 0, last = 0;
    for (attn::idx_t count = 32; count <= 2048; count *= 4) {
      std::printf("%8.3f", last = error(count));
      if (count == 32) first = last;
    }
    right &= last < first;
    // Extrapolates by error = factor / sqrt(count), roughly. Large errors fall more slowly than that.
    const double needed = 2048 * std::pow(last / wanted, 2);
    std::printf("  about %.0f: %s\n", needed, needed < length ? "fewer than tokens" : "softmax is cheaper");
  }

  // Training with one drawing fits the model to its errors; with another seed every so many steps they differ.
  const int drawings = 16;
  std::printf("\n%10s%22s%20s%20s   256 features, %d drawings\n", "|q|, |k|", "error of a drawing",
              "two drawings differ", "error of their mean", drawings);
  for (float size : {0.25f, 0.5f}) {
    const matrix q = size * q0, k = size * k0;
    matrix exact(length, dim), out(length, dim), before(length, dim), mean = matrix::Zero(length, dim);
    attn::full_softmax(q, k, v, exact);
    double error = 0, change = 0;
    for (std::uint64_t seed = 1; seed <= drawings; ++seed) {
      before = out;
      attn::performer(q, k, v, out, attn::draw_features<float>(256, dim, {.seed = seed}));
      error += (out - exact).norm() / exact.norm() / drawings;
      if (seed > 1) change += (out - before).norm() / exact.norm() / (drawings - 1);
      mean += out / drawings;
    }
    const double of_mean = (mean - exact).norm() / exact.norm();
    std::printf("%10.1f%22.3f%20.3f%20.3f\n", size * std::sqrt(double(dim)), error, change, of_mean);
    right &= change > error && of_mean < 0.8 * error;
  }
  return right ? 0 : 1;
}
