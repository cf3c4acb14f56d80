// attn: the scratch memory of the backward pass of a recurrence.
#pragma once

#include <attn/kernel/detail/backward_call.hpp>
#include <attn/kernel/detail/recurrence.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Scratch memory of one worker for a chunk. By the rule that corrects v becomes R, and u and y are its product with
/// beta and that of x; by the rule of low rank u is v, x and y are the gradients of v and W; by the other u and y are v
/// and x.
template <rule R, class T>
struct recurrence_backward_scratch : recurrence_keys<R, T> {
  panels<T> q, q_start, q_start_t, q_t, k_end_t, dq, dk, d_gamma;  // [token][feature]
  panels<T> u, u_t, d_out, d_out_t, x, y;                          // [token][column]
  panels<T> p, dp, dp_t;                                           // [token][token]
  panels<T> state_t, d_state_t;                                    // [column][feature]
  T *d_last, *rows;                                                // [feature]; [token][feature or column]
  // Of the rule that adds.
  panels<T> dk_bonus, out, p_t;
  T *phi, *d_phi, *dx;                                             // [feature][chunk]; [dim][chunk]
  T *bonus, *diagonal;                                             // of one head
  T *gate_scores, *gate_queries, *gate_keys, *gates;  // for the gradient of decay: see gate_gradients.hpp
  // Of the rules that read the state: the gradients of the rows of A, k or a; and the factors of rows of unit norm.
  panels<T> d_reads, y_t, da, da_t;
  T *q_norm = nullptr, *k_norm = nullptr;
  // Of the rule of low rank, as those of k, v, P and A.
  panels<T> db, w_t, p_b, dp_b, dp_b_t, da_k, da_k_t;

  static recurrence_backward_scratch layout(const chunk_memory& where, const kernel_backward_call<T>& in) {
    const kernel_call<T>& call = in.call;
    const idx_t m = in.features(), columns = in.columns(), dim = call.shape.dim, chunk = kernel_chunk;
    const idx_t own = call.recurrence.bonus ? 1 : 0;
    const bool decays = call.decays() != decay_kind::none;
    arena &memory = where.own, &kept = where.of(kept_for::pass_back);
    recurrence_backward_scratch s;
    idx_t map_scratch = 0;
    if constexpr (R == rule::add) map_scratch = (std::max)(call.map->scratch_size, in.map->scratch_size);
    static_cast<recurrence_keys<R, T>&>(s) = recurrence_keys<R, T>::layout(where, call, columns, map_scratch);
    const auto allocate = [&](idx_t count, idx_t cols, std::initializer_list<panels<T>*> all) {
      allocate_panels(memory, count, cols, all);
    };
    allocate_panels(kept, chunk + own, m, {&s.q});
    allocate(chunk + own, m, {&s.dq});  // with a bonus, rows are also read beginning with the second
    s.q.capacity = chunk;
    allocate(m, chunk + own, {&s.q_t});
    allocate(chunk, m, {&s.dk});
    s.q_start = s.q, s.k_end_t = s.k_t;
    if (decays) allocate(chunk + own, m, {&s.q_start});
    if (decays) allocate_panels(kept, m, chunk, {&s.k_end_t});
    if (in.d_log_decay) allocate(chunk, m, {&s.d_gamma});
    allocate_panels(kept, chunk, columns, {&s.d_out, &s.x});
    allocate(columns, chunk, {&s.u_t, &s.d_out_t});
    allocate(chunk + own, chunk, {&s.p, &s.dp});
    allocate(chunk, chunk + own, {&s.dp_t});
    allocate(columns, m, {&s.state_t, &s.d_state_t});
    s.d_last = memory.allocate<T>(round_up(m, panel_width<T>));
    s.u = s.v, s.y = s.x;
    if constexpr (R == rule::add) {
      allocate(m, chunk + own, {&s.q_start_t});
      if (own) allocate(chunk, m, {&s.dk_bonus});
      allocate(chunk, columns, {&s.out});
      allocate(chunk, chunk + own, {&s.p_t});
      allocate_numbers(memory, round_up(m, panel_width<T>) * chunk, {&s.phi, &s.d_phi});
      allocate_numbers(memory, (dim + tile_rows) * chunk, {&s.dx});
      allocate_numbers(memory, round_up(m, panel_width<T>), {&s.bonus});
      allocate_numbers(memory, chunk, {&s.diagonal, &s.gate_queries, &s.gate_keys});
      allocate_numbers(memory, in.d_gate ? chunk * chunk : 0, {&s.gate_scores});
      allocate_numbers(memory, in.d_gate ? call.shape.keys : 0, {&s.gates});
    } else {
      const idx_t second = R == rule::low_rank ? 1 : 0;  // rows are also read beginning with the second
      allocate(chunk + second, m, {&s.d_reads});
      allocate_panels(R == rule::low_rank ? kept : memory, chunk, columns, {&s.y});
      allocate(columns, chunk, {&s.y_t});
      allocate(chunk + second, chunk, {&s.da, &s.da_t});
      if constexpr (R == rule::correct) {
        allocate(chunk, columns, {&s.u});
        allocate_numbers(kept, chunk, {&s.q_norm, &s.k_norm});
      } else {
        allocate(chunk, m, {&s.db});
        allocate(columns, chunk, {&s.w_t});
        allocate(chunk, chunk, {&s.p_b, &s.dp_b, &s.dp_b_t, &s.da_k_t});
        allocate(chunk + 1, chunk, {&s.da_k});
      }
    }
    s.rows = memory.allocate<T>(chunk * (std::max)(m, columns));
    return s;
  }
};

}}}  // namespace attn::ATTN_ISA::detail
