// attn: the online softmax of many rows, set aside while others are attended. For operators whose keys come in several
// sets that group the rows differently.
#pragma once

#include <attn/softmax/blockwise.hpp>

namespace attn::detail {

/// What is known of every query of one head: the unnormalised output, the denominator and the maximum.
template <class T>
struct row_states {
  T* out = nullptr;  // [queries][out_stride]
  T* sum = nullptr;
  T* top = nullptr;
  index out_stride = 0;

  static row_states layout(carver& memory, index queries, index dim_v) {
    row_states states;
    states.out_stride = round_up(dim_v, panel_width<T>);
    states.out = memory.take<T>(queries * states.out_stride);
    states.sum = memory.take<T>(queries);
    states.top = memory.take<T>(queries);
    return states;
  }

  /// Sets the rows of a block aside.
  void save(const row_block<T>& block) const {
    for (index r = 0; r < block.rows; ++r) {
      const index i = block.where[r];
      copy(block.out + r * out_stride, out + i * out_stride);
      sum[i] = sum_lanes(load<T>(block.sum + r * width<T>));
      top[i] = block.top[r];
    }
  }

  /// Goes on with them: after block.begin().
  void resume(const row_block<T>& block) const {
    for (index r = 0; r < block.rows; ++r) {
      const index i = block.where[r];
      copy(out + i * out_stride, block.out + r * out_stride);
      block.sum[r * width<T>] = sum[i];
      block.top[r] = top[i];
    }
  }

 private:
  void copy(const T* from, T* to) const {
    for (index d = 0; d < out_stride; d += width<T>) store<T>(to + d, load<T>(from + d));
  }
};

}  // namespace attn::detail
