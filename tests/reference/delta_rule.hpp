#pragma once
// The delta rule (Yang 2024; gated: Yang 2025; per channel: Kimi Linear 2025), token by token:
//   S' = diag(e^g_t) S;   S = S' + β_t k_t (v_t - S'ᵀ k_t)ᵀ;   out_t = s Sᵀ q_t
#include <optional>

#include "reference/kernel.hpp"

namespace reference {

struct delta_rule_options {
  std::optional<double> scale, unit_norm_eps;  // 1 / √D; none
  std::vector<idx_t> lengths;
  tensor<double> key_mask;  // [B|1, 1, 1, L], 0: the token writes nothing
};

// Those not given are empty.
template <class N>
struct delta_rule_inputs {
  tensor<N> q, k, v;        // [B, Hk, L, D] twice, [B, Hv, L, Dv]
  tensor<N> beta;           // [B, Hv, L, 1]
  tensor<N> log_decay;      // [B, Hv, L, 1 or D]
  tensor<N> initial_state;  // [B, Hv, D, Dv]
};

template <class N>
struct delta_rule_result {
  tensor<N> out, final_state;
};

// Row i of x, divided by √(‖x‖² + eps) where there is an eps.
template <class N>
std::vector<wide<N>> delta_rule_row(const tensor<N>& x, idx_t b, idx_t h, idx_t i, std::optional<double> eps) {
  using std::sqrt;
  std::vector<wide<N>> row;
  wide<N> squares = 0;
  for (idx_t d = 0; d < x.dim(); ++d) {
    row.push_back(x(b, h, i, d));
    squares += row.back() * row.back();
  }
  if (!eps) return row;
  const wide<N> norm = sqrt(squares + static_cast<wide<N>>(*eps));
  for (wide<N>& number : row) number /= norm;
  return row;
}

template <class N>
delta_rule_result<N> delta_rule(const delta_rule_inputs<N>& x, const delta_rule_options& options) {
  using std::exp;
  using number = wide<N>;
  const idx_t heads = x.v.heads(), length = x.v.length(), dim = x.k.dim(), dim_v = x.v.dim();
  const number scale = static_cast<number>(options.scale.value_or(1 / std::sqrt(static_cast<double>(dim))));
  delta_rule_result<N> computed{tensor<N>(x.v.batch(), heads, length, dim_v),
                                tensor<N>(x.v.batch(), heads, dim, dim_v)};
  for (idx_t b = 0; b < x.v.batch(); ++b)
    for (idx_t h = 0; h < heads; ++h) {
      const idx_t key_head = h * x.k.heads() / heads;
      std::vector<std::vector<number>> state(static_cast<std::size_t>(dim));
      for (idx_t d = 0; d < dim; ++d)
        for (idx_t e = 0; e < dim_v; ++e)
          state[static_cast<std::size_t>(d)].push_back(x.initial_state.empty() ? N(0) : x.initial_state(b, h, d, e));
      for (idx_t t = 0; t < true_length(options.lengths, {}, b, length); ++t) {
        const std::vector<number> q = delta_rule_row(x.q, b, key_head, t, options.unit_norm_eps);
        const std::vector<number> k = delta_rule_row(x.k, b, key_head, t, options.unit_norm_eps);
        const number beta = x.beta.empty() ? N(1) : x.beta(b, h, t, 0);
        for (idx_t d = 0; d < dim && !x.log_decay.empty(); ++d) {
          const number decay = exp(number(x.log_decay(b, h, t, x.log_decay.dim() == 1 ? 0 : d)));
          for (number& element : state[static_cast<std::size_t>(d)]) element *= decay;
        }
        for (idx_t e = 0; e < dim_v; ++e) {
          const auto column = static_cast<std::size_t>(e);
          number difference = x.v(b, h, t, e), out = 0;
          for (std::size_t d = 0; d < k.size(); ++d) difference -= state[d][column] * k[d];
          for (std::size_t d = 0; d < k.size(); ++d) {
            if (!key_hidden(options.key_mask, b, t)) state[d][column] += beta * k[d] * difference;
            out += state[d][column] * q[d];
          }
          computed.out(b, h, t, e) = static_cast<N>(scale * out);
        }
      }
      for (idx_t d = 0; d < dim; ++d)
        for (idx_t e = 0; e < dim_v; ++e)
          computed.final_state(b, h, d, e) =
              static_cast<N>(state[static_cast<std::size_t>(d)][static_cast<std::size_t>(e)]);
    }
  return computed;
}

}  // namespace reference
