#pragma once
// Linear attention with all of its options, token by token:
//   S_t = diag(e^g_t) d_t S_(t-1) + φ(k_t) v_tᵀ, z likewise;   out_i = s φ(q_i)ᵀ S / (s φ(q_i)ᵀ z + ε)
// S of the position of query i, or, with a bonus u, S_(t-1) + diag(u) φ(k_t) v_tᵀ; not causal, of all keys.
#include "reference/linear.hpp"

namespace reference {

struct linear_decay_options : linear_options {
  double scale = 1;
};

// Those not given are empty. H of sums: as many heads as queries have, where a decay or an initial state has as many,
// else those of keys.
template <class N>
struct linear_inputs {
  tensor<N> q, k, v;          // [B, H, Lq, D], [B, Hkv, Lk, D], [B, Hkv, Lk, Dv]
  tensor<N> decay;            // [B, H or Hkv, Lk, 1]
  tensor<N> log_decay;        // [B, H or Hkv, Lk, 1 or features]
  tensor<N> bonus;            // [1, H, 1, features]
  tensor<N> initial_state;    // [B, H of sums, features, Dv]
  tensor<N> initial_weights;  // [B, H of sums, 1, features]

  idx_t sums_heads() const { return std::max({k.heads(), decay.heads(), log_decay.heads(), initial_state.heads()}); }
};

template <class N>
struct linear_result {
  tensor<N> out, final_state, final_weights;
};

// The sums of one head: S [features][Dv], and z as one more column.
template <class N>
using linear_sums = std::vector<std::vector<wide<N>>>;

// Row i of head h from the sums it sees.
template <class N>
void answer_query(const linear_sums<N>& sums, const features_of_numbers<N>& phi, const linear_decay_options& options,
                  tensor<N>& out, idx_t b, idx_t h, idx_t i) {
  const auto read = [&](idx_t column) {
    wide<N> sum = 0;
    for (std::size_t r = 0; r < phi.size(); ++r) sum += phi[r] * sums[r][static_cast<std::size_t>(column)];
    return sum * static_cast<wide<N>>(options.scale);
  };
  const wide<N> denominator = options.normalise ? read(out.dim()) + static_cast<wide<N>>(options.eps) : wide<N>(1);
  for (idx_t d = 0; d < out.dim() && denominator != 0; ++d) out(b, h, i, d) = static_cast<N>(read(d) / denominator);
}

template <class N>
linear_result<N> linear(const linear_inputs<N>& x, const linear_decay_options& options) {
  using std::exp;
  using number = wide<N>;
  const idx_t heads = x.q.heads(), kv_heads = x.k.heads(), sums_heads = x.sums_heads(), dim_v = x.v.dim();
  linear_result<N> computed{tensor<N>(x.q.batch(), heads, x.q.length(), dim_v), {}, {}};
  for (idx_t b = 0; b < x.q.batch(); ++b) {
    const idx_t queries = true_length(options.lengths, options.query_lengths, b, x.q.length());
    const idx_t keys = true_length(options.lengths, options.key_lengths, b, x.k.length());
    for (idx_t h = 0; h < sums_heads; ++h) {
      const idx_t kv_head = h / (sums_heads / kv_heads), group = heads / sums_heads;
      const std::size_t size = linear_features(options.feature, tensor<N>(1, 1, 1, x.k.dim()), 0, 0, 0).size();
      const idx_t rows = static_cast<idx_t>(size);
      if (computed.final_state.empty()) {
        computed.final_state = tensor<N>(x.q.batch(), sums_heads, rows, dim_v);
        computed.final_weights = tensor<N>(x.q.batch(), sums_heads, 1, rows);
      }
      linear_sums<N> sums(size, std::vector<number>(static_cast<std::size_t>(dim_v + 1)));
      for (idx_t r = 0; r < rows; ++r)
        for (idx_t d = 0; d <= dim_v; ++d) {
          number& start = sums[static_cast<std::size_t>(r)][static_cast<std::size_t>(d)];
          if (d < dim_v && !x.initial_state.empty()) start = x.initial_state(b, h, r, d);
          if (d == dim_v && !x.initial_weights.empty()) start = x.initial_weights(b, h, 0, r);
        }
      const auto answer = [&](idx_t i, idx_t own_key) {
        for (idx_t g = 0; g < group && i >= 0 && i < queries; ++g) {
          const idx_t head = h * group + g;
          linear_sums<N> seen = sums;
          if (own_key >= 0 && !key_hidden(options.key_mask, b, own_key)) {
            const auto phi = linear_features(options.feature, x.k, b, kv_head, own_key);
            for (std::size_t r = 0; r < size; ++r) {
              const number weight = x.bonus(0, head, 0, static_cast<idx_t>(r)) * phi[r];
              for (idx_t d = 0; d < dim_v; ++d)
                seen[r][static_cast<std::size_t>(d)] += weight * x.v(b, kv_head, own_key, d);
              seen[r][static_cast<std::size_t>(dim_v)] += weight;
            }
          }
          answer_query(seen, linear_features(options.feature, x.q, b, head, i), options, computed.out, b, head, i);
        }
      };
      const idx_t before = options.causal ? queries - keys : 0;  // queries before the first key
      for (idx_t i = 0; i < before; ++i) answer(i, -1);
      for (idx_t t = 0; t < keys; ++t) {
        if (options.causal && !x.bonus.empty()) answer(t + before, t);
        const auto phi = linear_features(options.feature, x.k, b, kv_head, t);
        for (std::size_t r = 0; r < size; ++r) {
          number decay = 1;
          if (!x.decay.empty()) decay *= x.decay(b, h / (sums_heads / x.decay.heads()), t, 0);
          if (!x.log_decay.empty())
            decay *= exp(number(x.log_decay(b, h / (sums_heads / x.log_decay.heads()), t,
                                            x.log_decay.dim() == 1 ? 0 : static_cast<idx_t>(r))));
          for (idx_t d = 0; d <= dim_v; ++d) {
            number& sum = sums[r][static_cast<std::size_t>(d)];
            sum = decay * sum;
            if (!key_hidden(options.key_mask, b, t))
              sum += phi[r] * (d < dim_v ? number(x.v(b, kv_head, t, d)) : number(1));
          }
        }
        if (options.causal && x.bonus.empty()) answer(t + before, -1);
      }
      for (idx_t i = 0; i < queries && !options.causal; ++i) answer(i, -1);
      for (idx_t r = 0; r < rows; ++r) {
        const auto& row = sums[static_cast<std::size_t>(r)];
        for (idx_t d = 0; d < dim_v; ++d)
          computed.final_state(b, h, r, d) = static_cast<N>(row[static_cast<std::size_t>(d)]);
        computed.final_weights(b, h, 0, r) = static_cast<N>(row[static_cast<std::size_t>(dim_v)]);
      }
    }
  }
  return computed;
}

}  // namespace reference
