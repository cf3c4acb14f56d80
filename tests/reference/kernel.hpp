#pragma once
// out_i = φ(q_i)ᵀ Σ_j φ(k_j) v_jᵀ / (φ(q_i)ᵀ Σ_j φ(k_j) + ε), written as a weighted mean over keys. Features of numbers
// are long double: those of long keys leave the range of double.
#include <type_traits>

#include "reference/softmax.hpp"

namespace reference {

// The numbers sums are made of, of elements that are double or `variable` (reference/variable.hpp).
template <class N>
using wide = std::conditional_t<std::is_same_v<N, double>, long double, N>;
template <class N>
using features_of_numbers = std::vector<wide<N>>;
using features = features_of_numbers<double>;

struct kernel_options {
  bool causal = false, normalise = true;
  std::vector<idx_t> lengths, query_lengths, key_lengths;
  double eps = 0;
  tensor<double> gate;      // [B, H or Hkv, L, 1], or empty
  bool complement = false;  // key j enters with 1 - g_j
  tensor<double> key_mask;  // [B|1, 1, 1, Lk], 0: the key adds nothing
  tensor<double>* terms = nullptr;  // where given: of each output, the size of the terms it is made of
};

// phi_q(b, h, i) and phi_k(b, h, j) give the features of a token, h counting query heads. `gate` as options.gate.
template <class N, class Q, class K>
tensor<N> kernel_attention(const tensor<N>& q, const tensor<N>& k, const tensor<N>& v, const tensor<N>& gates,
                           const kernel_options& options, Q&& phi_q, K&& phi_k) {
  using std::abs;
  using number = wide<N>;
  tensor<N> out(q.batch(), q.heads(), q.length(), v.dim());
  if (options.terms) *options.terms = tensor<double>(q.batch(), q.heads(), q.length(), v.dim());
  for (idx_t b = 0; b < q.batch(); ++b) {
    const idx_t queries = true_length(options.lengths, options.query_lengths, b, q.length());
    const idx_t keys = true_length(options.lengths, options.key_lengths, b, k.length());
    for (idx_t h = 0; h < q.heads(); ++h) {
      const idx_t kv_head = h / (q.heads() / k.heads());
      std::vector<features_of_numbers<N>> of_keys;
      for (idx_t j = 0; j < keys; ++j)
        of_keys.push_back(key_hidden(options.key_mask, b, j) ? features_of_numbers<N>() : phi_k(b, h, j));
      const auto gate = [&](idx_t j) -> number {
        if (gates.empty()) return 1;
        return gates(b, h / (q.heads() / gates.heads()), j, 0);
      };
      for (idx_t i = 0; i < queries; ++i) {
        const features_of_numbers<N> of_query = phi_q(b, h, i);
        const idx_t last = options.causal ? i + keys - queries : keys - 1;
        std::vector<number> sum(static_cast<std::size_t>(v.dim()));
        std::vector<long double> size(static_cast<std::size_t>(v.dim()));
        number denominator = 0, decay = 1;
        long double denominator_size = 0;
        for (idx_t j = last; j >= 0; --j) {
          number weight = 0;
          long double weight_size = 0;
          const bool hidden = key_hidden(options.key_mask, b, j);
          for (std::size_t r = 0; r < of_query.size() && !hidden; ++r) {
            const number term = of_query[r] * of_keys[static_cast<std::size_t>(j)][r];
            weight += term;
            if constexpr (std::is_same_v<N, double>) weight_size += abs(term);
          }
          const number factor = options.complement ? decay * (1 - gate(j)) : decay;
          weight *= factor;
          if constexpr (std::is_same_v<N, double>) weight_size *= factor;
          if (!gates.empty()) decay *= gate(j);
          if (hidden) continue;
          denominator += weight, denominator_size += weight_size;
          for (idx_t d = 0; d < v.dim(); ++d) {
            sum[static_cast<std::size_t>(d)] += weight * v(b, kv_head, j, d);
            if constexpr (std::is_same_v<N, double>)
              size[static_cast<std::size_t>(d)] += weight_size * abs(v(b, kv_head, j, d));
          }
        }
        if (options.normalise)
          denominator += static_cast<number>(options.eps);
        else
          denominator = 1;
        if (last < 0 || denominator == 0) continue;
        for (idx_t d = 0; d < v.dim(); ++d) {
          const number row = sum[static_cast<std::size_t>(d)] / denominator;
          out(b, h, i, d) = static_cast<N>(row);
          if constexpr (std::is_same_v<N, double>)
            if (options.terms)
              (*options.terms)(b, h, i, d) = static_cast<double>(
                  (size[static_cast<std::size_t>(d)] + abs(row) * denominator_size) / abs(denominator));
        }
      }
    }
  }
  return out;
}

}  // namespace reference
