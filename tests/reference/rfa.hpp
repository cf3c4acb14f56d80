#pragma once
// Random feature attention (Peng 2021): φ(x) = [sin, cos](W x / (‖x‖ + ε)).
#include "reference/kernel.hpp"

namespace reference {

struct rfa_options : kernel_options {
  double norm_eps = 0;
  tensor<double> features;  // [1, H, Hkv or 1, m, D]
};

inline result rfa(const tensor<double>& q, const tensor<double>& k, const tensor<double>& v, rfa_options options) {
  options.complement = !options.gate.empty();
  const index group = k.heads() ? q.heads() / k.heads() : 1;
  const tensor<double>& w = options.features;
  const auto phi = [&](const tensor<double>& x, index b, index x_head, index h, index i) {
    long double norm = 0;
    for (index d = 0; d < x.dim(); ++d) norm += static_cast<long double>(x(b, x_head, i, d)) * x(b, x_head, i, d);
    norm = std::sqrt(norm) + options.norm_eps;
    features sines, cosines;
    for (index r = 0; r < w.length(); ++r) {
      long double sum = 0;
      for (index d = 0; d < x.dim(); ++d) sum += w(0, h / (q.heads() / w.heads()), r, d) * x(b, x_head, i, d);
      const long double angle = norm == 0 ? 0 : sum / norm;
      sines.push_back(std::sin(angle));
      cosines.push_back(std::cos(angle));
    }
    sines.insert(sines.end(), cosines.begin(), cosines.end());
    return sines;
  };
  return kernel_attention(
      q, k, v, options, [&](index b, index h, index i) { return phi(q, b, h, h, i); },
      [&](index b, index h, index j) { return phi(k, b, h / group, h, j); });
}

}  // namespace reference
