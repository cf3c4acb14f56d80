#pragma once
// Masks of keys for tests of what hidden keys may not do.
#include <algorithm>
#include <limits>

#include "support/run.hpp"

namespace testing {

// Left padding of so many keys, of fewer in later items.
inline tensor<double> left_padding(idx_t batch, idx_t keys, idx_t hidden) {
  tensor<double> mask(batch, 1, 1, keys, 1);
  for (idx_t b = 0; b < batch; ++b)
    for (idx_t t = 0; t < std::min(keys, hidden - 60 * b); ++t) mask(b, 0, 0, t) = 0;
  return mask;
}

// Random for all items, or for each; left padding; nothing seen; one key seen.
inline constexpr int key_mask_count = 5;
inline tensor<double> key_mask_of(int kind, idx_t batch, idx_t keys) {
  if (kind < 2) return random_key_mask(3, kind == 0 ? 1 : batch, keys);
  if (kind == 2) return left_padding(batch, keys, 75);
  if (kind == 3) return tensor<double>(batch, 1, 1, keys, 0);
  return left_padding(batch, keys, keys - 1);
}

// The same keys or values with other numbers in hidden rows.
inline tensor<double> with_hidden(tensor<double> x, const tensor<double>& mask, double value) {
  for (idx_t b = 0; b < x.batch(); ++b)
    for (idx_t h = 0; h < x.heads(); ++h)
      for (idx_t t = 0; t < x.length(); ++t)
        for (idx_t d = 0; d < x.dim() && reference::key_hidden(mask, b, t); ++d) x(b, h, t, d) = value;
  return x;
}

inline constexpr double poisons[] = {std::numeric_limits<double>::quiet_NaN(), reference::infinity,
                                     -reference::infinity, 3e30, 1e-30};
template <class Problem>
Problem with_poison(Problem p, double value = poisons[0]) {
  p.k = with_hidden(p.k, p.options.key_mask, value), p.v = with_hidden(p.v, p.options.key_mask, value);
  return p;
}

}  // namespace testing
