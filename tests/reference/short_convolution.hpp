#pragma once
// The short convolution: sequences and states are tensors [batch, 1, length, channels], the weight [1, 1, channels,
// width], the bias [1, 1, 1, channels]; bias and initial state may be empty. Numbers are of type N: double, or
// reference::variable (variable.hpp).
#include "reference/layers.hpp"

namespace reference {

template <class N>
struct short_convolution_result {
  tensor<N> out, final_state;
};

template <class N, class F>
short_convolution_result<N> short_convolution(const tensor<N>& x, const tensor<N>& weight, const tensor<N>& bias,
                                              const tensor<N>& initial_state, F&& f,
                                              const std::vector<idx_t>& lengths = {}) {
  const idx_t width = weight.dim();
  short_convolution_result<N> r{tensor<N>(x.batch(), 1, x.length(), x.dim(), N(0)),
                                tensor<N>(x.batch(), 1, width - 1, x.dim(), N(0))};
  for (idx_t b = 0; b < x.batch(); ++b)
    for (idx_t c = 0; c < x.dim(); ++c) {
      const idx_t length = lengths.empty() ? x.length() : lengths[static_cast<std::size_t>(b)];
      const auto token = [&](idx_t t) {
        return t >= 0 ? x(b, 0, t, c) : initial_state.empty() ? N(0) : initial_state(b, 0, t + width - 1, c);
      };
      for (idx_t t = 0; t < length; ++t) {
        N sum = bias.empty() ? N(0) : bias(0, 0, 0, c);
        for (idx_t i = 0; i < width; ++i) sum += weight(0, 0, c, i) * token(t - width + 1 + i);
        r.out(b, 0, t, c) = f(sum);
      }
      for (idx_t e = 0; e < width - 1; ++e) r.final_state(b, 0, e, c) = token(length + e - width + 1);
    }
  return r;
}

}  // namespace reference
