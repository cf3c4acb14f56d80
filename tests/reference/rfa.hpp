#pragma once
// Random feature attention (Peng 2021): φ(x) = [sin, cos](W x / (‖x‖ + ε)).
#include "reference/kernel.hpp"

namespace reference {

struct rfa_options : kernel_options {
  double norm_eps = 0;
  tensor<double> features;  // [1, H, Hkv or 1, m, D]
};

// `gate` and `w` as options.gate and options.features.
template <class N>
tensor<N> rfa(const tensor<N>& q, const tensor<N>& k, const tensor<N>& v, const tensor<N>& gate, const tensor<N>& w,
              rfa_options options) {
  using std::cos, std::sin, std::sqrt;
  using number = wide<N>;
  options.complement = !gate.empty();
  const idx_t group = k.heads() ? q.heads() / k.heads() : 1;
  const auto phi = [&](const tensor<N>& x, idx_t b, idx_t x_head, idx_t h, idx_t i) {
    number norm = 0;
    for (idx_t d = 0; d < x.dim(); ++d) norm += static_cast<number>(x(b, x_head, i, d)) * x(b, x_head, i, d);
    norm = sqrt(norm) + static_cast<number>(options.norm_eps);
    features_of_numbers<N> sines, cosines;
    for (idx_t r = 0; r < w.length(); ++r) {
      number sum = 0;
      for (idx_t d = 0; d < x.dim(); ++d)
        sum += static_cast<number>(w(0, h / (q.heads() / w.heads()), r, d)) * x(b, x_head, i, d);
      const number angle = norm == 0 ? number(0) : sum / norm;
      sines.push_back(sin(angle));
      cosines.push_back(cos(angle));
    }
    sines.insert(sines.end(), cosines.begin(), cosines.end());
    return sines;
  };
  return kernel_attention(
      q, k, v, gate, options, [&](idx_t b, idx_t h, idx_t i) { return phi(q, b, h, h, i); },
      [&](idx_t b, idx_t h, idx_t j) { return phi(k, b, h / group, h, j); });
}

inline result rfa(const tensor<double>& q, const tensor<double>& k, const tensor<double>& v,
                  const rfa_options& options) {
  return {rfa(q, k, v, options.gate, options.features, options), {}};
}

}  // namespace reference
