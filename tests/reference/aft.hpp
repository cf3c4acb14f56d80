#pragma once
// What the oracles of the attention-free family share: a softmax over tokens for every channel on its own, in double,
// with plain loops and no code of the library; padding and masked keys are never read. N is double, or variable
// (reference/variable.hpp) for gradients.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>

#include "reference/key_mask.hpp"

namespace reference {

struct aft_options {
  bool causal = false, gate = true;
  std::vector<idx_t> lengths;
  tensor<double> key_mask;  // [B|1, 1, 1, L], 0: no row sees the key
};

// (head, row, key) -> what is added to the key
template <class N>
using aft_bias = std::function<N(idx_t, idx_t, idx_t)>;

template <class N>
tensor<N> aft(const tensor<N>& q, const tensor<N>& k, const tensor<N>& v, const aft_options& options,
              const aft_bias<N>& bias) {
  using std::exp;
  constexpr double masked = -std::numeric_limits<double>::infinity();
  tensor<N> out(q.batch(), q.heads(), q.length(), q.dim());
  const auto at = [](idx_t d) { return static_cast<std::size_t>(d); };
  std::vector<double> largest(at(q.dim()));  // it only stabilises
  std::vector<N> num(at(q.dim())), den(at(q.dim())), biases;
  for (idx_t b = 0; b < q.batch(); ++b)
    for (idx_t h = 0; h < q.heads(); ++h) {
      const idx_t length = options.lengths.empty() ? q.length() : options.lengths[at(b)];
      for (idx_t t = 0; t < length; ++t) {
        const idx_t keys = options.causal ? t + 1 : length;
        biases.clear();
        for (idx_t j = 0; j < keys; ++j)
          biases.push_back(key_hidden(options.key_mask, b, j) ? N(masked) : bias(h, t, j));
        // f(key plus bias, j, d) for what row t sees; channels side by side, which is quicker than one by one
        const auto for_each_seen = [&](auto&& f) {
          for (idx_t j = 0; j < keys; ++j)
            for (idx_t d = 0; d < q.dim() && static_cast<double>(biases[at(j)]) != masked; ++d)
              f(k(b, h, j, k.dim() == 1 ? 0 : d) + biases[at(j)], j, d);
        };
        std::fill(largest.begin(), largest.end(), masked);
        std::fill(num.begin(), num.end(), N(0)), std::fill(den.begin(), den.end(), N(0));
        for_each_seen([&](const N& x, idx_t, idx_t d) {
          largest[at(d)] = std::max(largest[at(d)], static_cast<double>(x));
        });
        for_each_seen([&](const N& x, idx_t j, idx_t d) {
          if (largest[at(d)] == masked) return;
          const N weight = exp(x - N(largest[at(d)]));
          num[at(d)] += weight * v(b, h, j, d);
          den[at(d)] += weight;
        });
        for (idx_t d = 0; d < q.dim(); ++d)
          if (largest[at(d)] != masked)
            out(b, h, t, d) = num[at(d)] / den[at(d)] * (options.gate ? N(1) / (N(1) + exp(-q(b, h, t, d))) : N(1));
      }
    }
  return out;
}

}  // namespace reference
