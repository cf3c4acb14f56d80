#pragma once
// out_lc = Re Σ_t Σ_d x_td e^(−2πi (l t / L + c d / D)) over the true length L of each item (Lee-Thorp 2021).
// The sums are plain; only the angles are exact: a fraction of the circle, brought into the first octant.
#include <cmath>
#include <complex>
#include <numbers>

#include "support/tensor.hpp"

namespace reference {

using testing::idx_t;
using testing::tensor;

struct fnet_options {
  std::vector<idx_t> lengths;
};

// e^(−2πi k / n)
inline std::complex<double> turn(idx_t k, idx_t n) {
  k %= n;
  if (2 * k > n) return std::conj(turn(n - k, n));
  if (4 * k > n) {  // the second quarter: half a circle less the angle
    const double rest = std::numbers::pi * static_cast<double>(n - 2 * k) / static_cast<double>(n);
    return {-std::cos(rest), -std::sin(rest)};
  }
  if (8 * k > n) {  // the second octant: a quarter less the angle
    const double rest = std::numbers::pi / 2 * static_cast<double>(n - 4 * k) / static_cast<double>(n);
    return {std::sin(rest), -std::cos(rest)};
  }
  const double angle = 2 * std::numbers::pi * static_cast<double>(k) / static_cast<double>(n);
  return {std::cos(angle), -std::sin(angle)};
}

inline std::vector<std::complex<double>> circle(idx_t n) {
  std::vector<std::complex<double>> all;
  for (idx_t k = 0; k < n; ++k) all.push_back(turn(k, n));
  return all;
}

template <class N>
tensor<N> fnet(const tensor<N>& x, const fnet_options& options = {}) {
  tensor<N> out(x.batch(), x.heads(), x.length(), x.dim());
  const idx_t dim = x.dim();
  const auto over_dim = circle(dim);
  for (idx_t b = 0; b < x.batch(); ++b) {
    const idx_t length = options.lengths.empty() ? x.length() : options.lengths[static_cast<std::size_t>(b)];
    const auto over_length = circle(length);
    for (idx_t h = 0; h < x.heads(); ++h)
      for (idx_t c = 0; c < dim; ++c) {
        std::vector<N> re(static_cast<std::size_t>(length)), im(re);  // of the transform over dim, at c
        for (idx_t t = 0; t < length; ++t)
          for (idx_t d = 0; d < dim; ++d) {
            const auto root = over_dim[static_cast<std::size_t>(c * d % dim)];
            re[static_cast<std::size_t>(t)] += x(b, h, t, d) * root.real();
            im[static_cast<std::size_t>(t)] += x(b, h, t, d) * root.imag();
          }
        for (idx_t l = 0; l < length; ++l) {
          N sum = 0;
          for (idx_t t = 0; t < length; ++t) {
            const auto root = over_length[static_cast<std::size_t>(l * t % length)];
            sum += re[static_cast<std::size_t>(t)] * root.real() - im[static_cast<std::size_t>(t)] * root.imag();
          }
          out(b, h, l, c) = sum;
        }
      }
  }
  return out;
}

}  // namespace reference
