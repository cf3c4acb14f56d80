#pragma once
// Strided and fixed attention (Sparse Transformers, Child 2019).
#include "reference/pattern.hpp"

namespace reference {

struct strided_options : softmax_options {
  bool fixed = false;
  index stride = 64, summary = 1;
};

inline bool sees(const strided_options& o, index, index position, index key, index) {
  if (!o.fixed) return std::abs(position - key) < o.stride || (position - key) % o.stride == 0;
  return block_of(position, o.stride) == block_of(key, o.stride) || key % o.stride >= o.stride - o.summary;
}

inline result strided(const tensor<double>& q, const tensor<double>& k, const tensor<double>& v,
                      const strided_options& options = {}) {
  return by_pattern(q, k, v, options);
}

}  // namespace reference
