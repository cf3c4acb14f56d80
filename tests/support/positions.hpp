#pragma once
// Lists of positions, as keep() takes them.
#include <attn/core/tensor_view.hpp>

#include <vector>

namespace testing::position_lists {

using attn::idx_t;
using positions = std::vector<idx_t>;

inline positions range(idx_t begin, idx_t end) {
  positions all;
  for (; begin < end; ++begin) all.push_back(begin);
  return all;
}
inline positions joined(positions a, const positions& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

}  // namespace testing::position_lists
