#pragma once
// Masks of keys, [B|1, 1, 1, Lk] or empty, as all oracles have them.
#include "support/tensor.hpp"

namespace reference {

using testing::idx_t;
using testing::tensor;

// Whether a mask hides key j: where it is 0.
inline bool key_hidden(const tensor<double>& mask, idx_t b, idx_t j) {
  return !mask.empty() && mask(mask.batch() == 1 ? 0 : b, 0, 0, j) == 0;
}

}  // namespace reference
