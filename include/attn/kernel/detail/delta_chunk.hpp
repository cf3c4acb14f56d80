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
// Products need their left operand by columns: names with _t are transposed matrices.
#pragma once

#include <attn/kernel/detail/delta_pairs.hpp>

#include <cmath>

namespace attn::inline ATTN_ISA::detail {

/// A value head: its rows and parameters. A call without queries is recognised by `out`, which then has no data; q
/// cannot serve, since it has no data either where its width is 0.
template <class T>
struct delta_head {
  stored_matrix<T> q{}, k{}, v{}, out{};
  idx_t b = 0, h = 0;
  tensor_view<const T, 3> beta{};
  tensor_view<const T> log_decay{};
  T scale = T(1), unit_norm_eps = T(-1);  // below 0: q and k are not normalised

  bool queries() const { return out.data != nullptr; }
};

/// Rows [begin, begin + count) of q or k and, in to_t, their transpose: normalised if eps >= 0; norm[t], where given,
/// is then the factor of row t.
template <class T>
void load_delta_rows(const stored_matrix<T>& from, idx_t begin, idx_t count, T eps, const panels<T>& to,
                     const panels<T>& to_t, T* norm = nullptr) {
  from.access->pack_panels(from, begin, count, to.data);
  for (idx_t t = 0; eps >= T(0) && t < count; ++t) {
    const T factor = T(1) / std::sqrt(dot_rows(to, to, t, from.cols) + eps);
    if (norm) norm[t] = factor;
    for (idx_t col = 0; col < from.cols; col += width<T>)
      store<T>(to.at(t, col), mul(load<T>(to.at(t, col)), broadcast<T>(factor)));
  }
  transpose_panels(to, count, from.cols, to_t);
}

/// The keys of a chunk, as the forward and the backward pass read them.
template <class T>
struct delta_keys {
  panels<T> k, k_t, k_start, k_start_t, k_end;  // [token][dim]
  panels<T> a, a_t, v;                          // [token][token]; [token][value dim]
  delta_decay<T> decay;
  delta_pair_scratch<T> pairs;
  T* beta;

  static delta_keys layout(arena& memory, idx_t dim, idx_t dim_v, decay_kind kind) {
    delta_keys s;
    constexpr idx_t chunk = kernel_chunk;
    const auto allocate = [&](idx_t rows, idx_t cols, std::initializer_list<panels<T>*> all) {
      for (panels<T>* x : all) *x = panels<T>::layout(memory, rows, cols);
    };
    allocate(chunk, dim, {&s.k});
    allocate(dim, chunk, {&s.k_t});
    s.k_start = s.k_end = s.k, s.k_start_t = s.k_t;
    if (kind != decay_kind::none) {
      allocate(chunk, dim, {&s.k_start, &s.k_end});
      allocate(dim, chunk, {&s.k_start_t});
    }
    allocate(chunk, chunk, {&s.a, &s.a_t});
    allocate(chunk, dim_v, {&s.v});
    s.decay = delta_decay<T>::layout(memory, dim, kind);
    s.pairs = delta_pair_scratch<T>::layout(memory, dim, kind);
    s.beta = memory.allocate<T>(chunk);
    return s;
  }

  void load(const delta_head<T>& head, idx_t begin, idx_t count, T* norm = nullptr) const {
    load_delta_rows(head.k, begin, count, head.unit_norm_eps, k, k_t, norm);
    head.v.access->pack_panels(head.v, begin, count, v.data);
    for (idx_t t = 0; t < count; ++t) beta[t] = head.beta ? head.beta(head.b, head.h, begin + t) : T(1);
    if (decay.kind != decay_kind::none) {
      decay.load(head.log_decay, head.b, head.h, begin, count);
      decay.from_start(k, count, k_start);
      transpose_panels(k_start, count, decay.dim, k_start_t);
      decay.to_end(k, count, k_end);
    }
    pair_products(decay, pairs, k, k_t, k, k_t, count, triangle::before, a);
    transpose_panels(a, count, count, a_t);
  }
};

/// Scratch memory of one worker; v becomes U.
template <class T>
struct delta_scratch : delta_keys<T> {
  panels<T> q, q_t, q_start, q_start_t, p, p_t, out;  // [token][dim]; [token][token]; [token][value dim]

  static delta_scratch layout(arena& memory, idx_t dim, idx_t dim_v, decay_kind kind) {
    delta_scratch s;
    static_cast<delta_keys<T>&>(s) = delta_keys<T>::layout(memory, dim, dim_v, kind);
    constexpr idx_t chunk = kernel_chunk;
    const auto allocate = [&](idx_t rows, idx_t cols, std::initializer_list<panels<T>*> all) {
      for (panels<T>* x : all) *x = panels<T>::layout(memory, rows, cols);
    };
    allocate(chunk, dim, {&s.q});
    allocate(dim, chunk, {&s.q_t});
    s.q_start = s.q, s.q_start_t = s.q_t;
    if (kind != decay_kind::none) {
      allocate(chunk, dim, {&s.q_start});
      allocate(dim, chunk, {&s.q_start_t});
    }
    allocate(chunk, chunk, {&s.p, &s.p_t});
    allocate(chunk, dim_v, {&s.out});
    return s;
  }
};

/// One chunk, tokens [begin, begin + count). Callers call the functions that they need, in this order. All but load()
/// may be called for some of the value columns, from `col` on; states are those of these columns.
template <class T>
struct delta_chunk {
  const delta_head<T>& head;
  const delta_scratch<T>& s;
  idx_t begin, count;
  idx_t col = 0, cols = head.v.cols;

  idx_t dim() const { return head.k.cols; }
  panels<T> values() const { return s.v.from_col(col); }
  panels<T> out() const { return s.out.from_col(col); }

  /// Everything that does not need the state.
  void load() const {
    s.load(head, begin, count);
    if (!head.queries()) return;
    load_delta_rows(head.q, begin, count, head.unit_norm_eps, s.q, s.q_t);
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
    const auto write = [&](idx_t i, idx_t c, const packet<T>& read) {
      T* const at = u.at(i, c);
      store<T>(at, mul(sub(load_packet(at), read), broadcast<T>(s.beta[i])));
    };
    if (before)
      product(s.k_start_t, count, *before, cols, dim(), write);
    else
      for (idx_t c = 0; c < cols; c += width<T>)
        for (idx_t i = 0; i < count; ++i) write(i, c, zero<T>());
    triangle_product<triangle::before>(s.a_t, count, u, cols,
                                       [&](idx_t i, idx_t c, const packet<T>& sum) {
                                         T* const at = u.at(i, c);
                                         store<T>(at, sub(load_packet(at), mul(sum, broadcast<T>(s.beta[i]))));
                                       });
  }

  /// The rows of out.
  void answer(const panels<T>* before) const {
    const panels<T> to = out();
    if (before)
      product(s.q_start_t, count, *before, cols, dim(), write_to(to));
    const packet<T> scale = broadcast<T>(head.scale);
    triangle_product<triangle::up_to>(s.p_t, count, values(), cols,
                                      [&](idx_t i, idx_t c, const packet<T>& sum) {
                                        T* const at = to.at(i, c);
                                        store<T>(at, mul(before ? add(load_packet(at), sum) : sum, scale));
                                      });
    write_rows(to);
  }

  /// The state after the chunk; `empty`: it was 0, and its memory is not read.
  void update(const panels<T>& state, bool empty) const {
    if (empty)
      product(s.k_end, dim(), values(), cols, count, write_to(state));
    else
      pass_chunk(s.decay, s.k_end, values(), cols, count, state);
  }

  void run(const panels<T>& state, bool empty) const {
    load();
    run_columns(state, empty);
  }
  /// All steps after load().
  void run_columns(const panels<T>& state, bool empty) const {
    const panels<T>* const before = empty ? nullptr : &state;
    solve(before);
    if (head.queries()) answer(before);
    update(state, empty);
  }

 private:
  static ATTN_INLINE packet<T> load_packet(const T* at) { return detail::load<T>(at); }

  void write_rows(const panels<T>& from) const {
    const stored_matrix<T>& to = head.out;
    for (idx_t i = 0; i < count; ++i)
      for (idx_t c = 0; c < cols; c += panel_width<T>)
        to.access->write(from.at(i, c), to.row(begin + i) + (col + c) * to.col_stride * to.access->size,
                         std::min<idx_t>(panel_width<T>, cols - c), to.col_stride);
  }
};

}  // namespace attn::inline ATTN_ISA::detail
