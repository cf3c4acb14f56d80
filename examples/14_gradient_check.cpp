// Is a derivative right? The directional check, on the derivative of a score function of one's own: for any direction
// t,
//   <gradient, t>  equals  (L(x + e t) - L(x - e t)) / 2 e,   L = <d_out, out>.
#include <attn/softmax/full_softmax_backward.hpp>

#include <Eigen/Core>
#include <cmath>
#include <cstdio>
#include <cstdlib>

using matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;  // [length, heads * dim]

const attn::idx_t length = 50, heads = 2, dim = 16;

// A score function, and its derivative by s times d: softplus, which grows more slowly with the distance.
const auto score = [](double s, auto, auto, auto i, auto j) {
  return std::log1p(std::exp(s)) / std::sqrt(1 + std::abs(double(i - j)));
};
const auto score_backward = [](double s, double d, auto, auto, auto i, auto j) {
  return d / (1 + std::exp(-s)) / std::sqrt(1 + std::abs(double(i - j)));
};
const auto wrong_backward = [](double s, double d, auto, auto, auto, auto) { return d / (1 + std::exp(-s)); };

auto split(auto& x) { return attn::split_heads(x, heads); }

// The largest difference between the two sides of the check for q, k and v, relative to them.
double check(const auto& derivative) {
  std::srand(1);
  const auto random = [] { return matrix(matrix::Random(length, heads * dim)); };
  matrix x[] = {random(), random(), random()};  // q, k, v
  matrix out = random(), d_out = random(), gradient[] = {random(), random(), random()};
  const auto forward = [&] {
    attn::full_softmax(split(x[0]), split(x[1]), split(x[2]), split(out), {.causal = true}, score);
    return out.cwiseProduct(d_out).sum();
  };
  forward();
  attn::full_softmax_backward(split(x[0]), split(x[1]), split(x[2]), split(out), split(d_out),
                              {.q = split(gradient[0]), .k = split(gradient[1]), .v = split(gradient[2])},
                              {.causal = true}, score, derivative);
  double worst = 0;
  for (int n = 0; n < 3; ++n) {
    const matrix direction = random(), at = x[n];
    constexpr double step = 1e-5;  // its square, and rounding over it, are about 1e-10
    x[n] = at + step * direction;
    const double above = forward();
    x[n] = at - step * direction;
    const double below = forward();
    x[n] = at;
    const double measured = (above - below) / (2 * step), computed = gradient[n].cwiseProduct(direction).sum();
    std::printf("  %c: %14.10f measured, %14.10f computed\n", "qkv"[n], measured, computed);
    worst = std::max(worst, std::abs(measured - computed) / std::abs(measured));
  }
  return worst;
}

int main() {
  std::puts("With the derivative of the score function:");
  const double right = check(score_backward);
  std::puts("With one that forgets the distance (v does not depend on it):");
  const double wrong = check(wrong_backward);
  std::printf("Relative differences: %.1e and %.1e\n", right, wrong);
  return right < 1e-7 && wrong > 1e-3 ? 0 : 1;
}
