#pragma once
// Biases for |t - t'| < window only, from w [1|H, L, L] or a band [1|H, L, 2 window - 1] (Zhai 2021).
#include "reference/aft.hpp"

namespace reference {

struct aft_local_options : aft_options {
  tensor<double> w;
  index window = 128;
  bool band = false;
};

inline tensor<double> aft_local(const tensor<double>& q, const tensor<double>& k, const tensor<double>& v,
                                const aft_local_options& options) {
  return aft(q, k, v, options, [&](index h, index t, index j) {
    if (std::abs(t - j) >= options.window) return 0.0;
    // not broadcast(): a w of one row is one of length 1
    return options.w(0, options.w.heads() == 1 ? 0 : h, t, options.band ? j - t + options.window - 1 : j);
  });
}

}  // namespace reference
