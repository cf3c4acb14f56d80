#pragma once
// Runs a problem through selected_keys.
#include "reference/selected_keys.hpp"
#include "support/call_selected_keys.hpp"
#include "support/run_pattern.hpp"

namespace testing {

using selected_problem = problem<reference::selected_keys_options>;

inline attn::tensor_view<const idx_t> lists_view(const tensor<idx_t>& x) { return {x.data.data(), x.extents}; }

template <class S>
struct library_form<S, reference::selected_keys_options> : compiled_selected_keys<S> {
  static void set(const reference::selected_keys_options& from, with_lists<attn::selected_keys_options<S>>& to) {
    to.block = from.block, to.span = from.span, to.indices = lists_view(from.indices);
    to.first_position = from.first_position;
    if (!from.first_positions.empty()) to.first_position = from.first_positions;
  }
};

template <class N>
auto reference_of(const tensor<N>& q, const tensor<N>& k, const tensor<N>& v,
                  const reference::basic_selected_keys_options<N>& o) {
  return reference::selected_keys(q, k, v, o);
}
inline reference::result expected(const selected_problem& p) {
  return reference::selected_keys(p.q, p.k, p.v, p.options);
}

// Lists of names below `names`, in any order, some of them -1 and some twice.
inline tensor<idx_t> random_lists(std::uint64_t seed, idx_t batch, idx_t heads, idx_t queries, idx_t count,
                                  idx_t names) {
  tensor<idx_t> lists(batch, heads, queries, count, -1);
  random_source random(seed);
  for (idx_t& name : lists.data) name = random.below(names + 1) - 1;
  return lists;
}

}  // namespace testing
