// Full attention on Eigen matrices: one head, several heads side by side, and the weights made visible.
#include <attn/softmax/full_softmax.hpp>

#include <Eigen/Core>
#include <cmath>
#include <cstdio>

using matrix = Eigen::MatrixXf;  // column-major; row-major matrices, maps and blocks work too

// Every token carries its position as waves: q(i) . k(j) is then a function of i - j, peaked at i = j + shift.
matrix positions(int length, int dim, double shift, double fastest) {
  matrix x(length, dim);
  for (int i = 0; i < length; ++i)
    for (int d = 0; d < dim / 2; ++d) {
      const double angle = (i - shift) * fastest * std::pow(0.7, d);
      x(i, 2 * d) = static_cast<float>(2 * std::cos(angle));
      x(i, 2 * d + 1) = static_cast<float>(2 * std::sin(angle));
    }
  return x;
}

void show(const matrix& weights) {
  for (Eigen::Index i = 0; i < weights.rows(); ++i, std::puts(""))
    for (Eigen::Index j = 0; j < weights.cols(); ++j) {
      const int shade = static_cast<int>(std::lround(9 * std::sqrt(weights(i, j))));
      std::printf("%c%c", " .:-=+*#%@"[shade], " .:-=+*#%@"[shade]);
    }
}

int main() {
  const int length = 20, dim = 16, heads = 2;

  // One head: matrices of shape [length, dim]. With the identity as values, the output is the weights.
  const matrix k = positions(length, dim, 0, 1.5), v = matrix::Identity(length, length);
  matrix weights(length, length);
  attn::full_softmax(positions(length, dim, 4, 1.5), k, v, weights, {.causal = true});
  std::puts("Causal weights of a head that looks four tokens back (a row a query):");
  show(weights);
  std::printf("Every row sums to 1, off by at most %.1e.\n\n", (weights.rowwise().sum().array() - 1).abs().maxCoeff());

  // Two heads side by side in one matrix [length, heads * dim], as projections compute them: no copy, only a view.
  matrix q2(length, heads * dim), k2(length, heads * dim), out(length, heads * length);
  q2 << positions(length, dim, 0, 3), positions(length, dim, -2, 0.3);
  k2 << k, positions(length, dim, 0, 0.3);
  matrix v2(length, heads * length), lse(length, heads);
  v2 << v, v;
  attn::full_softmax(attn::split_heads(q2, heads), attn::split_heads(k2, heads), attn::split_heads(v2, heads),
                     attn::split_heads(out, heads), {.lse = {lse.data(), {1, heads, length}}});
  std::puts("Weights of the second of two heads, blurred and two tokens ahead:");
  show(out.rightCols(length));

  // The same by hand. The log-sum-exp, which costs nothing extra, turns any score into its weight.
  const auto q_head = q2.rightCols(dim), k_head = k2.rightCols(dim);
  const matrix scores = q_head * k_head.transpose() / std::sqrt(float(dim));
  const matrix by_hand = (scores.colwise() - lse.col(1)).array().exp();
  const float difference = (by_hand - out.rightCols(length)).cwiseAbs().maxCoeff();
  std::printf("exp(score - lse) gives the same weights, off by at most %.1e.\n", difference);
  return difference < 1e-5f ? 0 : 1;
}
