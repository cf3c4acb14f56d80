// attn: the online softmax states of all queries of one head, stored while other rows are attended. For operators with
// several sets of keys that group the queries differently.
#pragma once

#include <attn/softmax/detail/blockwise.hpp>

namespace attn::inline ATTN_ISA::detail {

/// States of the rows of `result`; the unnormalised output is stored in the memory of `result` where possible.
template <class T>
struct row_states : online_softmax<T> {
  template <class S>
  static bool fit_into(const tensor_view<S>& result) {
    return std::same_as<S, T> && result.stride(3) == 1 && result.extent(3) % width<T> == 0;
  }
  template <class S>
  static row_states layout(arena& memory, const tensor_view<S>& result) {
    const index queries = result.extent(2), cols = round_up(result.extent(3), width<T>);
    return {{.rows = queries,
             .cols = cols,
             .stride = cols,
             .maximum = memory.allocate<T>(queries),
             .sum = memory.allocate<T>(queries),
             .out = memory.allocate<T>(fit_into(result) ? 0 : queries * cols)}};
  }
  /// The states of one head.
  template <class S>
  row_states of(const tensor_view<S>& result, index batch, index head) const {
    row_states states = *this;
    if constexpr (std::same_as<S, T>)
      if (fit_into(result)) {
        const matrix_view<T> memory = head_of(result, batch, head);
        states.out = memory.data;
        states.stride = memory.row_stride;
      }
    return states;
  }

  /// Stores the rows of a block.
  template <class P>
  void save(const row_block<P>& block) const {
    for (index r = 0; r < block.rows; ++r) this->copy_row(block.positions[r], block.state, r);
  }
  /// Restores them; call it after block.begin().
  template <class P>
  void resume(const row_block<P>& block) const {
    for (index r = 0; r < block.rows; ++r) block.state.copy_row(r, *this, block.positions[r]);
  }
};

}  // namespace attn::inline ATTN_ISA::detail
