#pragma once
// Biases that depend on the distance alone: kernels w [1, 1|H, height, width], height 1 for a sequence (Zhai 2021).
#include "reference/aft.hpp"

namespace reference {

template <class N>
struct aft_conv_options_of : aft_options {
  tensor<N> w;
  idx_t columns = 0;  // of an image; 0: one line
};
using aft_conv_options = aft_conv_options_of<double>;

template <class N>
tensor<N> aft_conv(const tensor<N>& q, const tensor<N>& k, const tensor<N>& v, const aft_conv_options_of<N>& options) {
  const idx_t up = options.w.length() / 2, side = options.w.dim() / 2;
  const idx_t columns = options.columns > 0 ? options.columns : q.length();
  return aft<N>(q, k, v, options, [=, &options](idx_t h, idx_t t, idx_t j) {
    const idx_t down = j / columns - t / columns, right = j % columns - t % columns;
    if (std::abs(down) > up || std::abs(right) > side) return N(0);
    return options.w(0, options.w.heads() == 1 ? 0 : h, down + up, right + side);
  });
}

}  // namespace reference
