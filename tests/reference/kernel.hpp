#pragma once
// out_i = φ(q_i)ᵀ Σ_j φ(k_j) v_jᵀ / (φ(q_i)ᵀ Σ_j φ(k_j) + ε), written as a weighted mean over keys. Features are
// long double: those of long keys leave the range of double.
#include "reference/softmax.hpp"

namespace reference {

using features = std::vector<long double>;

struct kernel_options {
  bool causal = false, normalise = true;
  std::vector<index> lengths, query_lengths, key_lengths;
  double eps = 0;
  tensor<double> gate;      // [B, H or Hkv, L, 1], or empty
  bool complement = false;  // key j enters with 1 - g_j
  tensor<double>* terms = nullptr;  // where given: of each output, the size of the terms it is made of
};

// phi_q(b, h, i) and phi_k(b, h, j) give the features of a token, h counting query heads.
template <class Q, class K>
result kernel_attention(const tensor<double>& q, const tensor<double>& k, const tensor<double>& v,
                        const kernel_options& options, Q&& phi_q, K&& phi_k) {
  result into{empty_result(q, v).out, {}};
  if (options.terms) *options.terms = into.out;
  for (index b = 0; b < q.batch(); ++b) {
    const index queries = true_length(options.lengths, options.query_lengths, b, q.length());
    const index keys = true_length(options.lengths, options.key_lengths, b, k.length());
    for (index h = 0; h < q.heads(); ++h) {
      const index kv_head = h / (q.heads() / k.heads());
      std::vector<features> of_keys;
      for (index j = 0; j < keys; ++j) of_keys.push_back(phi_k(b, h, j));
      const auto gate = [&](index j) -> long double {
        if (options.gate.empty()) return 1;
        return options.gate(b, h / (q.heads() / options.gate.heads()), j, 0);
      };
      for (index i = 0; i < queries; ++i) {
        const features of_query = phi_q(b, h, i);
        const index last = options.causal ? i + keys - queries : keys - 1;
        std::vector<long double> sum(static_cast<std::size_t>(v.dim())), size = sum;
        long double denominator = 0, denominator_size = 0, decay = 1;
        for (index j = last; j >= 0; --j) {
          long double weight = 0, weight_size = 0;
          for (std::size_t r = 0; r < of_query.size(); ++r) {
            const long double term = of_query[r] * of_keys[static_cast<std::size_t>(j)][r];
            weight += term, weight_size += std::abs(term);
          }
          const long double factor = options.complement ? decay * (1 - gate(j)) : decay;
          weight *= factor, weight_size *= factor;
          decay *= gate(j);
          denominator += weight, denominator_size += weight_size;
          for (index d = 0; d < v.dim(); ++d) {
            sum[static_cast<std::size_t>(d)] += weight * v(b, kv_head, j, d);
            size[static_cast<std::size_t>(d)] += weight_size * std::abs(v(b, kv_head, j, d));
          }
        }
        denominator = options.normalise ? denominator + static_cast<long double>(options.eps) : 1;
        if (last < 0 || denominator == 0) continue;
        for (index d = 0; d < v.dim(); ++d) {
          const long double row = sum[static_cast<std::size_t>(d)] / denominator;
          into.out(b, h, i, d) = static_cast<double>(row);
          if (options.terms)
            (*options.terms)(b, h, i, d) = static_cast<double>(
                (size[static_cast<std::size_t>(d)] + std::abs(row) * denominator_size) / std::abs(denominator));
        }
      }
    }
  }
  return into;
}

}  // namespace reference
