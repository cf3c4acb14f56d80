#pragma once
// What the oracles of the attention-free family share: a softmax over tokens for every channel on its own, in double,
// with plain loops and no code of the library; padding and masked keys are never read.
#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>

#include "support/tensor.hpp"

namespace reference {

using testing::index;
using testing::tensor;

struct aft_options {
  bool causal = false, gate = true;
  std::vector<index> lengths;
};

// (head, row, key) -> what is added to the key
using aft_bias = std::function<double(index, index, index)>;

inline tensor<double> aft(const tensor<double>& q, const tensor<double>& k, const tensor<double>& v,
                          const aft_options& options, const aft_bias& bias) {
  constexpr double masked = -std::numeric_limits<double>::infinity();
  tensor<double> out(q.batch(), q.heads(), q.length(), q.dim());
  std::vector<double> biases, logits;
  for (index b = 0; b < q.batch(); ++b)
    for (index h = 0; h < q.heads(); ++h) {
      const index length = options.lengths.empty() ? q.length() : options.lengths[static_cast<std::size_t>(b)];
      for (index t = 0; t < length; ++t) {
        std::vector<index> seen;
        biases.clear();
        for (index j = 0; j < (options.causal ? t + 1 : length); ++j)
          if (const double w = bias(h, t, j); w != masked) seen.push_back(j), biases.push_back(w);
        logits.resize(seen.size());
        for (index d = 0; d < q.dim(); ++d) {
          double largest = masked, num = 0, den = 0;
          for (std::size_t n = 0; n < seen.size(); ++n) {
            logits[n] = k(b, h, seen[n], k.dim() == 1 ? 0 : d) + biases[n];
            largest = std::max(largest, logits[n]);
          }
          if (largest == masked) continue;
          for (std::size_t n = 0; n < seen.size(); ++n) {
            const double weight = std::exp(logits[n] - largest);
            num += weight * v(b, h, seen[n], d);
            den += weight;
          }
          out(b, h, t, d) = num / den * (options.gate ? 1 / (1 + std::exp(-q(b, h, t, d))) : 1);
        }
      }
    }
  return out;
}

}  // namespace reference
