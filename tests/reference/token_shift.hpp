#pragma once
// The token shift: sequences are tensors [batch, 1, length, channels], states [batch, 1, 1, channels], mix [1, 1, 1,
// channels]; mix and initial state may be empty. Numbers are of type N: double, or reference::variable (variable.hpp).
#include "reference/layers.hpp"

namespace reference {

template <class N>
struct token_shift_result {
  tensor<N> out, final_state;
};

template <class N>
token_shift_result<N> token_shift(const tensor<N>& x, const tensor<N>& mix, const tensor<N>& initial_state,
                                  const std::vector<idx_t>& lengths = {}) {
  token_shift_result<N> r{tensor<N>(x.batch(), 1, x.length(), x.dim(), N(0)),
                          tensor<N>(x.batch(), 1, 1, x.dim(), N(0))};
  for (idx_t b = 0; b < x.batch(); ++b)
    for (idx_t c = 0; c < x.dim(); ++c) {
      N before = initial_state.empty() ? N(0) : initial_state(b, 0, 0, c);
      const idx_t length = lengths.empty() ? x.length() : lengths[static_cast<std::size_t>(b)];
      for (idx_t t = 0; t < length; ++t) {
        const N here = x(b, 0, t, c);
        r.out(b, 0, t, c) = mix.empty() ? before : here + mix(0, 0, 0, c) * (before - here);
        before = here;
      }
      r.final_state(b, 0, 0, c) = before;
    }
  return r;
}

}  // namespace reference
