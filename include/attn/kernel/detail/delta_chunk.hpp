// attn: one chunk of tokens of the delta rule: products, and a triangular solve.
//
// With S the state before the chunk and gamma_i the sum of the log decays of its tokens up to i:
//
//   A_ij = k_i.k_j e^(gamma_i - gamma_j), j < i       k_start_i = k_i e^gamma_i       k_end_j = k_j e^(gamma_last - gamma_j)
//   P_ij = q_i.k_j e^(gamma_i - gamma_j), j <= i      q_start_i = q_i e^gamma_i
//
//   1. U   = beta (V - k_start S - A U)          row by row: what each token writes to its key
//   2. out = scale (q_start S + P U)
//   3. S   = e^gamma_last S + k_end^T U
//
// Products need their left operand by columns: what is called _t is transposed.
#pragma once

#include <attn/kernel/detail/delta_pairs.hpp>

#include <cmath>

namespace attn::inline ATTN_ISA::detail {

/// A head of values: its rows, and the numbers of its first token. No queries: out without data, for q of no width has
/// none either.
template <class T>
struct delta_head {
  stored_matrix<T> q{}, k{}, v{}, out{};
  index b = 0, h = 0;
  tensor_view<const T, 3> beta{};
  tensor_view<const T> log_decay{};
  T scale = T(1), unit_norm_eps = T(-1);  // below 0: q and k as they are

  bool queries() const { return out.data != nullptr; }
};

/// Scratch memory of one worker.
template <class T>
struct delta_scratch {
  panels<T> q, k, q_start, k_start, k_end;  // [token][dim]
  panels<T> q_t, k_t, q_start_t, k_start_t;
  panels<T> a, p, a_t, p_t;  // [token][token]
  panels<T> values, out;     // [token][value dim]: V, then U
  delta_decay<T> decay;
  delta_pair_scratch<T> pairs;
  T* beta;

  static delta_scratch layout(arena& memory, index dim, index dim_v, decay_kind kind) {
    delta_scratch s;
    constexpr index chunk = kernel_chunk;
    const auto allocate = [&](index rows, index cols, std::initializer_list<panels<T>*> all) {
      for (panels<T>* x : all) *x = panels<T>::layout(memory, rows, cols);
    };
    allocate(chunk, dim, {&s.q, &s.k});
    allocate(dim, chunk, {&s.q_t, &s.k_t});
    s.q_start = s.q, s.k_start = s.k_end = s.k, s.q_start_t = s.q_t, s.k_start_t = s.k_t;
    if (kind != decay_kind::none) {
      allocate(chunk, dim, {&s.q_start, &s.k_start, &s.k_end});
      allocate(dim, chunk, {&s.q_start_t, &s.k_start_t});
    }
    allocate(chunk, chunk, {&s.a, &s.p, &s.a_t, &s.p_t});
    allocate(chunk, dim_v, {&s.values, &s.out});
    s.decay = delta_decay<T>::layout(memory, dim, kind);
    s.pairs = delta_pair_scratch<T>::layout(memory, dim, kind);
    s.beta = memory.allocate<T>(chunk);
    return s;
  }
};

/// One chunk, tokens [begin, begin + count), of which the caller calls what it needs, in this order. All but load() may be
/// called for some of the value columns, from `col` on; states are those of these columns.
template <class T>
struct delta_chunk {
  const delta_head<T>& head;
  const delta_scratch<T>& s;
  index begin, count;
  index col = 0, cols = head.v.cols;

  index dim() const { return head.k.cols; }
  panels<T> values() const { return {s.values.panel(col), s.values.capacity}; }
  panels<T> out() const { return {s.out.panel(col), s.out.capacity}; }

  /// All that does not need the state.
  void load() const {
    load_rows(head.k, s.k, s.k_t);
    head.v.access->pack_panels(head.v, begin, count, s.values.data);
    for (index t = 0; t < count; ++t) s.beta[t] = head.beta ? head.beta(head.b, head.h, begin + t) : T(1);
    if (s.decay.kind != decay_kind::none) {
      s.decay.load(head.log_decay, head.b, head.h, begin, count);
      s.decay.from_start(s.k, count, s.k_start);
      transpose_panels(s.k_start, count, dim(), s.k_start_t);
      s.decay.to_end(s.k, count, s.k_end);
    }
    pair_products(s.decay, s.pairs, s.k, s.k_t, s.k, s.k_t, count, triangle::before, s.a);
    transpose_panels(s.a, count, count, s.a_t);
    if (!head.queries()) return;
    load_rows(head.q, s.q, s.q_t);
    if (s.decay.kind != decay_kind::none) {
      s.decay.from_start(s.q, count, s.q_start);
      transpose_panels(s.q_start, count, dim(), s.q_start_t);
    }
    pair_products(s.decay, s.pairs, s.q, s.q_t, s.k, s.k_t, count, triangle::up_to, s.p);
    transpose_panels(s.p, count, count, s.p_t);
  }

  /// values = U after the state `before`; null: 0.
  void solve(const panels<T>* before) const {
    const panels<T> u = values();
    const auto write = [&](index i, index c, const packet<T>& read) {
      T* const at = u.at(i, c);
      store<T>(at, mul(sub(load_packet(at), read), broadcast<T>(s.beta[i])));
    };
    if (before)
      product(s.k_start_t, count, *before, cols, dim(), [&](index i, index c, const packet<T>& sum) {
        if (i < count) write(i, c, sum);
      });
    else
      for (index c = 0; c < cols; c += width<T>)
        for (index i = 0; i < count; ++i) write(i, c, zero<T>());
    triangle_product<triangle::before>(s.a_t, count, u, cols,
                                       [&](index i, index c, const packet<T>& sum) {
                                         T* const at = u.at(i, c);
                                         store<T>(at, sub(load_packet(at), mul(sum, broadcast<T>(s.beta[i]))));
                                       });
  }

  /// The rows of out.
  void answer(const panels<T>* before) const {
    const panels<T> to = out();
    if (before)
      product(s.q_start_t, count, *before, cols, dim(),
              [&](index i, index c, const packet<T>& sum) { store<T>(to.at(i, c), sum); });
    const packet<T> scale = broadcast<T>(head.scale);
    triangle_product<triangle::up_to>(s.p_t, count, values(), cols,
                                      [&](index i, index c, const packet<T>& sum) {
                                        T* const at = to.at(i, c);
                                        store<T>(at, mul(before ? add(load_packet(at), sum) : sum, scale));
                                      });
    write_rows(to);
  }

  /// The state becomes that after the chunk; `empty`: it was 0, whatever lies in its memory.
  void update(const panels<T>& state, bool empty) const {
    product(s.k_end, dim(), values(), cols, count, [&](index d, index c, const packet<T>& sum) {
      if (d >= dim()) return;
      T* const at = state.at(d, c);
      store<T>(at, empty ? sum : fma(load_packet(at), broadcast<T>(s.decay.whole(d, count)), sum));
    });
  }

  void run(const panels<T>& state, bool empty) const {
    load();
    run_columns(state, empty);
  }
  /// All that comes after load().
  void run_columns(const panels<T>& state, bool empty) const {
    const panels<T>* const before = empty ? nullptr : &state;
    solve(before);
    if (head.queries()) answer(before);
    update(state, empty);
  }

 private:
  static ATTN_INLINE packet<T> load_packet(const T* at) { return detail::load<T>(at); }

  /// Rows of q or k, of unit norm if so asked.
  void load_rows(const stored_matrix<T>& from, const panels<T>& to, const panels<T>& to_t) const {
    from.access->pack_panels(from, begin, count, to.data);
    if (head.unit_norm_eps >= T(0))
      for (index t = 0; t < count; ++t) {
        const packet<T> norm = broadcast<T>(T(1) / std::sqrt(dot_rows(to, to, t, dim()) + head.unit_norm_eps));
        for (index c = 0; c < dim(); c += width<T>) {
          T* const at = to.at(t, c);
          store<T>(at, mul(load_packet(at), norm));
        }
      }
    transpose_panels(to, count, dim(), to_t);
  }

  void write_rows(const panels<T>& from) const {
    const stored_matrix<T>& to = head.out;
    for (index i = 0; i < count; ++i)
      for (index c = 0; c < cols; c += panel_width<T>)
        to.access->write(from.at(i, c), to.row(begin + i) + (col + c) * to.col_stride * to.access->size,
                         std::min<index>(panel_width<T>, cols - c), to.col_stride);
  }
};

}  // namespace attn::inline ATTN_ISA::detail
