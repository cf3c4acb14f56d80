#pragma once
// Strided and fixed attention (Sparse Transformers, Child 2019).
#include "reference/pattern.hpp"

namespace reference {

template <class N>
struct basic_strided_options : basic_softmax_options<N> {
  bool fixed = false;
  idx_t stride = 64, summary = 1;
};
using strided_options = basic_strided_options<double>;

template <class N>
void copy_choices(const strided_options& from, basic_strided_options<N>& to) {
  copy_choices(static_cast<const softmax_options&>(from), static_cast<basic_softmax_options<N>&>(to));
  to.fixed = from.fixed, to.stride = from.stride, to.summary = from.summary;
}

template <class N>
bool sees(const basic_strided_options<N>& o, idx_t, idx_t position, idx_t key, idx_t) {
  if (!o.fixed) return std::abs(position - key) < o.stride || (position - key) % o.stride == 0;
  return block_of(position, o.stride) == block_of(key, o.stride) || key % o.stride >= o.stride - o.summary;
}

template <class N>
basic_result<N> strided(const tensor<N>& q, const tensor<N>& k, const tensor<N>& v,
                        const basic_strided_options<N>& options = {}) {
  return by_pattern(q, k, v, options);
}

}  // namespace reference
