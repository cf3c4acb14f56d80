#pragma once
// No biases (Zhai 2021).
#include "reference/aft.hpp"

namespace reference {

struct aft_simple_options : aft_options {};

template <class N>
tensor<N> aft_simple(const tensor<N>& q, const tensor<N>& k, const tensor<N>& v,
                     const aft_simple_options& options = {}) {
  return aft<N>(q, k, v, options, [](idx_t, idx_t, idx_t) { return N(0); });
}

}  // namespace reference
