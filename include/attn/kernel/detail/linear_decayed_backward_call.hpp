// attn: a backward call of linear with decays per channel, a bonus, a scale or states, and its scratch memory.
#pragma once

#include <attn/kernel/detail/decayed_keys.hpp>
#include <attn/kernel/detail/features_backward.hpp>

namespace attn::inline ATTN_ISA::detail {

/// A backward call, after its checks; `call` is the forward call without out. Gradients that are not wanted are null.
template <class T>
struct decayed_backward_call {
  kernel_call<T>& call;
  feature_map_backward<T>& map;
  stored_tensor<T> d_out;
  stored_gradient<T> dq, dk, dv;
  tensor_view<const T> d_final_state{};
  tensor_view<const T, 3> d_final_weights{};
  tensor_view<T, 3> d_decay{};
  tensor_view<T> d_log_decay{};
  tensor_view<T, 2> d_bonus{};
  tensor_view<T> d_initial_state{};
  tensor_view<T, 3> d_initial_weights{};
  bool accumulate = false;

  const linear_extra<T>& extra() const { return call.extra; }
  idx_t features() const { return call.map->features; }
  idx_t dim_v() const { return call.shape.dim_v; }
  /// Which head of a parameter or of its gradient belongs to head h of the sums, and whether earlier heads of sums add
  /// to it.
  template <class View>
  idx_t at(const View& x, idx_t h) const { return call.parameter_head(x.extent(1), h); }
  template <class View>
  bool adds(const View& x, idx_t h) const { return accumulate || h % (call.heads / x.extent(1)) != 0; }
  /// Whether there is a column of ones.
  bool weights() const { return call.normalise || d_final_weights; }
  idx_t columns() const { return dim_v() + (weights() ? 1 : 0); }
  bool of_decays() const { return d_decay || d_log_decay; }
  bool of_queries() const { return dq || d_bonus || of_decays(); }
  bool of_keys() const { return dk || of_decays(); }
  /// Whether any wanted gradient depends on later tokens.
  bool reverse() const { return of_keys() || dv || d_initial_state || d_initial_weights; }
  decay_kind kind() const { return call.decays(); }
};

/// Scratch memory of one worker for a chunk.
template <class T>
struct decayed_backward_scratch : decayed_keys<T> {
  panels<T> q, q_start, q_start_t, q_t, k_end_t, dq, dk, dk_own, d_gamma;  // [token][feature]
  panels<T> v_t, d_out, d_out_t, out, dv;                                  // [token][value dim]
  panels<T> p, p_t, dp, dp_t;                                              // [token][token]
  panels<T> state_t, d_state_t;                                            // [value dim][feature]
  T *phi, *d_phi, *dx;                               // [feature][chunk]; [dim][chunk]
  T *d_last, *bonus, *diagonal, *rows;               // bonus: of one head
  T *gate_pairs, *gate_queries, *gate_keys, *gates;  // for the gradient of decay: see gate_gradients.hpp

  static decayed_backward_scratch layout(arena& memory, const decayed_backward_call<T>& call) {
    constexpr idx_t chunk = kernel_chunk;
    const idx_t m = call.features(), dim_v = call.columns(), dim = call.call.shape.dim;
    const idx_t own = call.extra().bonus ? 1 : 0;
    decayed_backward_scratch s;
    static_cast<decayed_keys<T>&>(s) = decayed_keys<T>::layout(
        memory, call.call, dim_v, std::max(call.call.map->scratch_size, call.map.scratch_size));
    const auto allocate = [&](idx_t count, idx_t cols, std::initializer_list<panels<T>*> all) {
      for (panels<T>* x : all) *x = panels<T>::layout(memory, count, cols);
    };
    const auto numbers = [&](idx_t count, std::initializer_list<T**> all) {
      for (T** x : all) *x = memory.allocate<T>(count);
    };
    allocate(chunk + own, m, {&s.q, &s.dq});  // with a bonus, rows are also read beginning with the second
    allocate(m, chunk + own, {&s.q_t, &s.q_start_t});
    s.q.capacity = chunk;
    allocate(chunk, m, {&s.dk});
    allocate(m, chunk, {&s.k_end_t});
    s.q_start = s.q;
    if (call.kind() != decay_kind::none) allocate(chunk + own, m, {&s.q_start});
    if (call.d_log_decay) allocate(chunk, m, {&s.d_gamma});
    if (call.extra().bonus) allocate(chunk, m, {&s.dk_own});
    allocate(chunk, dim_v, {&s.d_out, &s.out, &s.dv});
    allocate(dim_v, chunk, {&s.v_t, &s.d_out_t});
    allocate(chunk + own, chunk, {&s.p, &s.dp});
    allocate(chunk, chunk + own, {&s.p_t, &s.dp_t});
    allocate(dim_v, m, {&s.state_t, &s.d_state_t});
    numbers(round_up(m, panel_width<T>) * chunk, {&s.phi, &s.d_phi});
    numbers((dim + tile_rows) * chunk, {&s.dx});
    numbers(round_up(m, panel_width<T>), {&s.d_last, &s.bonus});
    numbers(chunk, {&s.diagonal, &s.gate_queries, &s.gate_keys});
    numbers(chunk * dim_v, {&s.rows});
    numbers(call.d_decay ? chunk * chunk : 0, {&s.gate_pairs});
    numbers(call.d_decay ? call.call.shape.keys : 0, {&s.gates});
    return s;
  }
};

}  // namespace attn::inline ATTN_ISA::detail
