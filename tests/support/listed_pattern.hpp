#pragma once
// A user's pattern for pattern_softmax, and its reference: the same pairs of query and key, listed one by one.
#include <algorithm>
#include <map>
#include <utility>

#include "reference/softmax.hpp"
#include "reference/variable.hpp"
#include "support/call_patterns.hpp"

namespace reference {

template <class N>
struct basic_listed_options : basic_softmax_options<N> {
  testing::listed_pattern pattern, joined_to;     // the second empty: none
  std::map<std::pair<idx_t, idx_t>, idx_t> seen;  // (position of the query, key) -> how often
};
using listed_options = basic_listed_options<double>;
template <class N>
void copy_choices(const listed_options& from, basic_listed_options<N>& to) {
  copy_choices(static_cast<const softmax_options&>(from), static_cast<basic_softmax_options<N>&>(to));
  to.seen = from.seen;
}
template <class N>
bool sees(const basic_listed_options<N>& o, idx_t, idx_t position, idx_t key, idx_t) {
  return o.seen.count({position, key}) != 0;
}

}  // namespace reference

namespace testing {

// Lists what queries from position `first` on see of so many keys.
inline void note(const listed_pattern& pattern, idx_t first, idx_t keys, reference::listed_options& to) {
  for (const auto& set : pattern.all)
    for (idx_t p = set.queries.begin; p < std::min(set.queries.end, keys); p += set.queries.step) {
      if (p < first) continue;
      for (const auto& given : set.pieces) {
        std::vector<idx_t> list = given.list;
        if (list.empty())
          for (idx_t j = given.range.begin; j < given.range.end; j += given.range.step) list.push_back(j);
        for (idx_t j : list)
          if (j >= 0 && j < keys && !(given.except_self && j == p) &&
              (given.left == attn::unlimited || (p - given.left <= j && j <= p + given.right)))
            ++to.seen[{p, j}];
      }
    }
}

}  // namespace testing
