#pragma once
// A learned bias w [1|H, L, L] for every pair of positions (Zhai 2021).
#include "reference/aft.hpp"

namespace reference {

struct aft_full_options : aft_options {
  tensor<double> w;
};

inline tensor<double> aft_full(const tensor<double>& q, const tensor<double>& k, const tensor<double>& v,
                               const aft_full_options& options) {
  return aft(q, k, v, options, [&](index h, index t, index j) { return options.w.broadcast(0, h, t, j); });
}

}  // namespace reference
