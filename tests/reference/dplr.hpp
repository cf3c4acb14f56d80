#pragma once
// The generalised delta rule (RWKV-7: Peng 2025), token by token:
//   S = diag(e^g_t) S + b_t (a_tᵀ S) + k_t v_tᵀ;   out_t = s Sᵀ q_t
#include <optional>

#include "reference/kernel.hpp"

namespace reference {

struct dplr_options {
  std::optional<double> scale;  // 1 / √D
  std::vector<idx_t> lengths;
  tensor<double> key_mask;  // [B|1, 1, 1, L], 0: the token writes nothing
};

// Those not given are empty.
template <class N>
struct dplr_inputs {
  tensor<N> q, k, v, a, b;  // [B, H, L, D], v [B, H, L, Dv]
  tensor<N> log_decay;      // [B, H, L, 1 or D]
  tensor<N> initial_state;  // [B, H, D, Dv]
};

template <class N>
struct dplr_result {
  tensor<N> out, final_state;
};

template <class N>
dplr_result<N> dplr(const dplr_inputs<N>& x, const dplr_options& options) {
  using std::exp;
  using number = wide<N>;
  const idx_t heads = x.v.heads(), length = x.v.length(), dim = x.k.dim(), dim_v = x.v.dim();
  const number scale = static_cast<number>(options.scale.value_or(1 / std::sqrt(static_cast<double>(dim))));
  dplr_result<N> computed{tensor<N>(x.v.batch(), heads, length, dim_v), tensor<N>(x.v.batch(), heads, dim, dim_v)};
  for (idx_t b = 0; b < x.v.batch(); ++b)
    for (idx_t h = 0; h < heads; ++h)
      for (idx_t e = 0; e < dim_v; ++e) {
        std::vector<number> state;  // one column of S
        for (idx_t d = 0; d < dim; ++d) state.push_back(x.initial_state.empty() ? N(0) : x.initial_state(b, h, d, e));
        for (idx_t t = 0; t < true_length(options.lengths, {}, b, length); ++t) {
          number read = 0, out = 0;
          for (idx_t d = 0; d < dim; ++d) read += number(x.a(b, h, t, d)) * state[static_cast<std::size_t>(d)];
          for (idx_t d = 0; d < dim; ++d) {
            number& element = state[static_cast<std::size_t>(d)];
            if (!x.log_decay.empty())
              element *= exp(number(x.log_decay(b, h, t, x.log_decay.dim() == 1 ? 0 : d)));
            if (!key_hidden(options.key_mask, b, t))
              element += number(x.b(b, h, t, d)) * read + number(x.k(b, h, t, d)) * number(x.v(b, h, t, e));
            out += element * number(x.q(b, h, t, d));
          }
          computed.out(b, h, t, e) = static_cast<N>(scale * out);
        }
        for (idx_t d = 0; d < dim; ++d)
          computed.final_state(b, h, d, e) = static_cast<N>(state[static_cast<std::size_t>(d)]);
      }
  return computed;
}

}  // namespace reference
