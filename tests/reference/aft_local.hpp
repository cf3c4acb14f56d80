#pragma once
// Biases for |t - t'| < window only, from w [1|H, L, L] or a band [1|H, L, 2 window - 1] (Zhai 2021).
#include "reference/aft.hpp"

namespace reference {

template <class N>
struct aft_local_options_of : aft_options {
  tensor<N> w;
  idx_t window = 128;
  bool band = false;
};
using aft_local_options = aft_local_options_of<double>;

template <class N>
tensor<N> aft_local(const tensor<N>& q, const tensor<N>& k, const tensor<N>& v,
                    const aft_local_options_of<N>& options) {
  return aft<N>(q, k, v, options, [&](idx_t h, idx_t t, idx_t j) {
    if (std::abs(t - j) >= options.window) return N(0);
    // not broadcast(): a w of one row is one of length 1
    return options.w(0, options.w.heads() == 1 ? 0 : h, t, options.band ? j - t + options.window - 1 : j);
  });
}

}  // namespace reference
