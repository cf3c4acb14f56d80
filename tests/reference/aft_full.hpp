#pragma once
// A learned bias w [1|H, L, L] for every pair of positions (Zhai 2021).
#include "reference/aft.hpp"

namespace reference {

template <class N>
struct aft_full_options_of : aft_options {
  tensor<N> w;
};
using aft_full_options = aft_full_options_of<double>;

template <class N>
tensor<N> aft_full(const tensor<N>& q, const tensor<N>& k, const tensor<N>& v, const aft_full_options_of<N>& options) {
  return aft<N>(q, k, v, options, [&](idx_t h, idx_t t, idx_t j) { return options.w.broadcast(0, h, t, j); });
}

}  // namespace reference
