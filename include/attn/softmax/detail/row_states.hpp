// attn: the online softmax of many rows, set aside while others are attended. For operators whose keys come in several
// sets that group the rows differently.
#pragma once

#include <attn/softmax/detail/blockwise.hpp>

namespace attn::inline ATTN_ISA::detail {

/// What is known of every query of one head: the unnormalised output, the denominator and the maximum.
template <class T>
struct row_states {
  T* out = nullptr;
  T* sum = nullptr;
  T* top = nullptr;
  index cols = 0, row_stride = 0;

  /// Can the rows of the result themselves keep what will become of them?
  template <class S>
  static bool fit_into(const tensor_view<S>& result) {
    return std::same_as<S, T> && result.stride(3) == 1 && result.extent(3) % width<T> == 0;
  }
  template <class S>
  static row_states layout(arena& memory, const tensor_view<S>& result) {
    row_states states;
    const index queries = result.extent(2);
    states.cols = states.row_stride = round_up(result.extent(3), width<T>);
    states.out = memory.allocate<T>(fit_into(result) ? 0 : queries * states.cols);
    states.sum = memory.allocate<T>(queries);
    states.top = memory.allocate<T>(queries);
    return states;
  }
  /// The states of one head.
  template <class S>
  row_states of(const tensor_view<S>& result, index batch, index head) const {
    row_states states = *this;
    if constexpr (std::same_as<S, T>)
      if (fit_into(result)) {
        const matrix_view<T> rows = head_of(result, batch, head);
        states.out = rows.data;
        states.row_stride = rows.row_stride;
      }
    return states;
  }

  T* row(index i) const { return out + i * row_stride; }

  /// Sets the rows of a block aside.
  void save(const row_block<T>& block) const {
    for (index r = 0; r < block.rows; ++r) {
      const index i = block.positions[r];
      copy(block.out + r * block.out_stride, row(i));
      sum[i] = sum_lanes(load<T>(block.sum + r * width<T>));
      top[i] = block.top[r];
    }
  }

  /// Goes on with them: after block.begin().
  void resume(const row_block<T>& block) const {
    for (index r = 0; r < block.rows; ++r) {
      const index i = block.positions[r];
      copy(row(i), block.out + r * block.out_stride);
      block.sum[r * width<T>] = sum[i];
      block.top[r] = top[i];
    }
  }

 private:
  void copy(const T* from, T* to) const {
    for (index d = 0; d < cols; d += width<T>) store<T>(to + d, load<T>(from + d));
  }
};

}  // namespace attn::detail
