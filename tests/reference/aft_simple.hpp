#pragma once
// No biases (Zhai 2021).
#include "reference/aft.hpp"

namespace reference {

struct aft_simple_options : aft_options {};

inline tensor<double> aft_simple(const tensor<double>& q, const tensor<double>& k, const tensor<double>& v,
                                 const aft_simple_options& options = {}) {
  return aft(q, k, v, options, [](index, index, index) { return 0.0; });
}

}  // namespace reference
