#pragma once
// Linear attention (Katharopoulos 2020): features number by number, or any map of a token.
#include "reference/kernel.hpp"

namespace reference {

enum class linear_feature { elu_plus_one, relu, identity, square, products };

struct linear_options : kernel_options {
  linear_feature feature = linear_feature::elu_plus_one;
};

template <class N>
features_of_numbers<N> linear_features(linear_feature kind, const tensor<N>& x, idx_t b, idx_t h, idx_t i) {
  using std::exp;
  features_of_numbers<N> phi;
  for (idx_t d = 0; d < x.dim(); ++d) {
    const N number = x(b, h, i, d);
    switch (kind) {
      case linear_feature::elu_plus_one:
        phi.push_back(number > 0 ? number + 1 : exp(number));
        break;
      case linear_feature::relu:
        phi.push_back(number > 0 ? number : N(0));
        break;
      case linear_feature::identity:
        phi.push_back(number);
        break;
      case linear_feature::square:
        phi.push_back(number * number);
        break;
      case linear_feature::products:  // (1 + x)², (1 + x)(1 + next): more features than numbers
        const N next = x(b, h, i, (d + 1) % x.dim());
        phi.push_back((1 + number) * (1 + number));
        phi.push_back((1 + number) * (1 + next));
    }
  }
  return phi;
}

template <class N>
tensor<N> linear(const tensor<N>& q, const tensor<N>& k, const tensor<N>& v, const tensor<N>& gate,
                 const linear_options& options) {
  const idx_t group = k.heads() ? q.heads() / k.heads() : 1;
  return kernel_attention(
      q, k, v, gate, options, [&](idx_t b, idx_t h, idx_t i) { return linear_features(options.feature, q, b, h, i); },
      [&](idx_t b, idx_t h, idx_t j) { return linear_features(options.feature, k, b, h / group, j); });
}

inline result linear(const tensor<double>& q, const tensor<double>& k, const tensor<double>& v,
                     const linear_options& options) {
  return {linear(q, k, v, options.gate, options), {}};
}

}  // namespace reference
