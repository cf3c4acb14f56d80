// attn: the online softmax states of all queries of one head, stored while other rows are attended. For operators with
// several sets of keys that group the queries differently.
#pragma once

#include <attn/softmax/detail/blockwise.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// States of the rows of `result`; the unnormalised output is stored in the memory of `result` where possible.
template <class T>
struct row_states : online_softmax<T> {
  T *sum_errors = nullptr, *out_errors = nullptr;  // what sums of many parts lost: [rows], [rows][cols]; null: not kept

  template <class S>
  static bool fit_into(const tensor_view<S>& result) {
    return std::same_as<S, T> && result.stride(3) == 1 && result.extent(3) % width<T> == 0;
  }
  template <class S>
  static row_states layout(arena& memory, const tensor_view<S>& result, bool errors = false) {
    const idx_t queries = result.extent(2), cols = round_up(result.extent(3), width<T>);
    row_states states{{.rows = queries, .cols = cols, .stride = cols, .maximum = memory.allocate<T>(queries),
                       .sum = memory.allocate<T>(queries),
                       .out = memory.allocate<T>(fit_into(result) ? 0 : queries * cols)}};
    if (errors) states.sum_errors = memory.allocate<T>(queries), states.out_errors = memory.allocate<T>(queries * cols);
    return states;
  }
  /// The states of one head.
  template <class S>
  row_states of(const tensor_view<S>& result, idx_t batch, idx_t head) const {
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
    for (idx_t r = 0; r < block.rows; ++r) this->copy_row(block.positions[r], block.state, r);
  }
  /// Restores them; call it after block.begin().
  template <class P>
  void resume(const row_block<P>& block) const {
    for (idx_t r = 0; r < block.rows; ++r) block.state.copy_row(r, *this, block.positions[r]);
  }
  /// The same in two steps, so that what a block adds is summed up before it meets larger sums: maxima after
  /// block.begin(), sums before save() or finish().
  template <class P>
  void resume_maxima(const row_block<P>& block) const {
    for (idx_t r = 0; r < block.rows; ++r) block.state.maximum[r] = this->maximum[block.positions[r]];
  }
  template <class P>
  [[gnu::noinline]] void resume_sums(const row_block<P>& block, bool last) const {
    const auto& state = block.state;
    for (idx_t r = 0; r < block.rows; ++r) {
      const idx_t i = block.positions[r];
      const T factor = this->maximum[i] < state.maximum[r] ? std::exp2(this->maximum[i] - state.maximum[r]) : T(1);
      packet<T> weights = broadcast<T>(this->sum[i] * factor), sum_error = zero<T>();
      if (sum_errors) sum_error = broadcast<T>(sum_errors[i] * factor);
      add_compensated(weights, sum_error, broadcast<T>(state.row_sum(r)));
      alignas(64) T lanes[2][width<T>];
      store<T>(lanes[0], last ? compensated_sum<T>(weights, sum_error) : weights), store<T>(lanes[1], sum_error);
      std::fill_n(state.sum + r * width<T>, width<T>, T(0));
      state.sum[r * width<T>] = lanes[0][0];
      if (sum_errors) sum_errors[i] = lanes[1][0];
      const T* const saved = this->row(i);
      T *const to = state.row(r), *const errors = out_errors ? out_errors + i * this->cols : nullptr;
      for (idx_t d = 0; d < this->cols; d += width<T>) {
        if (!errors) {
          store<T>(to + d, fma(load<T>(saved + d), broadcast<T>(factor), load<T>(to + d)));
          continue;
        }
        packet<T> all = mul(load<T>(saved + d), broadcast<T>(factor));
        packet<T> error = mul(load<T>(errors + d), broadcast<T>(factor));
        add_compensated(all, error, load<T>(to + d));
        store<T>(to + d, last ? compensated_sum<T>(all, error) : all), store<T>(errors + d, error);
      }
    }
  }
  /// Rows that are saved for the first time.
  template <class P>
  void clear_errors(const row_block<P>& block) const {
    for (idx_t r = 0; r < block.rows && sum_errors; ++r) {
      const idx_t i = block.positions[r];
      sum_errors[i] = T(0);
      std::fill_n(out_errors + i * this->cols, this->cols, T(0));
    }
  }
};

}}}  // namespace attn::ATTN_ISA::detail
