// attn: the backward pass of one chunk of the delta rule.
//
// With gamma the sum of the log decays in the chunk up to a token, both ends included, and s d_out written d_out:
//
//   forward   A_ij = k_i.k_j e^(gamma_i - gamma_j) (j < i),   P_ij = q_i.k_j e^(gamma_i - gamma_j) (j <= i)
//             R = v - k_start S0 - A U,  U = beta R,          S1 = diag(e^gamma_C) S0 + k_end^T U
//   backward  dU = P^T d_out + k_end dS1,                     X = dU - A^T Y,  Y = beta X
//             dP = d_out U^T,  dA = -Y U^T,  dv = Y,          dbeta_i = X_i.R_i
//             dS0 = diag(e^gamma_C) dS1 + q_start^T d_out - k_start^T Y
//             dq and dk through the pairs (delta_pairs_backward.hpp), q_start, k_start = k e^gamma and
//             k_end = k e^(gamma_C - gamma)
//   decay     dgamma_i = q_i dq_i + k_i (dk_i of rows i - dk_i of columns i), and of the last token
//             + sum_j k_j dk_end_j e^(..) + S0.dS1 e^gamma_C;  dg_t = sum of dgamma_i over i >= t of the chunk
#pragma once

#include <attn/kernel/detail/delta_call.hpp>
#include <attn/kernel/detail/delta_pairs_backward.hpp>
#include <attn/kernel/detail/stored_gradients.hpp>

namespace attn::inline ATTN_ISA::detail {

/// A backward call of the delta rule, after its checks. Gradients that are not wanted are null.
template <class T>
struct delta_backward_call {
  stored_tensor<T> q, k, v, d_out;
  delta_shape shape{};
  sequence_lengths lengths{};
  tensor_view<const T, 3> beta{};
  tensor_view<const T> log_decay{}, initial_state{}, d_final_state{};
  T scale = T(1), unit_norm_eps = T(-1);  // below 0: q and k are not normalised
  stored_gradient<T> dq{}, dk{}, dv{};
  tensor_view<T, 3> d_beta{};
  tensor_view<T> d_log_decay{}, d_initial_state{};
  bool accumulate = false;

  idx_t group() const { return shape.key_heads ? shape.heads / shape.key_heads : 0; }
  delta_head<T> head(idx_t b, idx_t h) const {
    return {.k = k.head(b, h / group()), .v = v.head(b, h), .b = b, .h = h, .beta = beta, .log_decay = log_decay,
            .unit_norm_eps = unit_norm_eps};
  }
  bool unit_norm() const { return unit_norm_eps >= T(0); }
  bool of_queries() const { return dq || d_log_decay; }
  bool of_keys() const { return dk || d_log_decay; }
  /// Whether any wanted gradient depends on later tokens.
  bool reverse() const { return of_keys() || dv || d_beta || d_initial_state; }
  decay_kind decay() const {
    return !log_decay ? decay_kind::none : log_decay.extent(3) == 1 ? decay_kind::token : decay_kind::channel;
  }
};

/// Scratch memory of one worker for a chunk. `_t` is transposed.
template <class T>
struct delta_backward_scratch : delta_keys<T> {
  panels<T> q, q_t, q_start, k_end_t;           // [token][dim]
  panels<T> u, u_t, d_out, d_out_t, x, y, y_t;  // [token][value dim]; v becomes R
  panels<T> p, da, da_t, dp, dp_t;              // [token][token]
  panels<T> s_t, ds_t;                          // [value dim][dim]
  panels<T> dq, dk_row, dk_col, d_gamma;        // [token][dim]
  T *q_norm, *k_norm, *d_last;
  T* rows;  // [token][dim or value dim]

  static delta_backward_scratch layout(arena& memory, idx_t dim, idx_t dim_v, decay_kind kind) {
    delta_backward_scratch s;
    static_cast<delta_keys<T>&>(s) = delta_keys<T>::layout(memory, dim, dim_v, kind);
    constexpr idx_t chunk = kernel_chunk;
    const auto allocate = [&](idx_t m, idx_t n, std::initializer_list<panels<T>*> all) {
      for (panels<T>* each : all) *each = panels<T>::layout(memory, m, n);
    };
    allocate(chunk, dim, {&s.q, &s.dq, &s.dk_row, &s.dk_col});
    allocate(dim, chunk, {&s.q_t});
    s.q_start = s.q, s.k_end_t = s.k_t;
    if (kind != decay_kind::none) {
      allocate(chunk, dim, {&s.q_start, &s.d_gamma});
      allocate(dim, chunk, {&s.k_end_t});
    }
    allocate(chunk, dim_v, {&s.u, &s.d_out, &s.x, &s.y});
    allocate(dim_v, chunk, {&s.u_t, &s.d_out_t, &s.y_t});
    allocate(chunk, chunk, {&s.p, &s.da, &s.da_t, &s.dp, &s.dp_t});
    allocate(dim_v, dim, {&s.s_t, &s.ds_t});
    for (T** each : {&s.q_norm, &s.k_norm}) *each = memory.allocate<T>(chunk);
    s.d_last = memory.allocate<T>(round_up(dim, panel_width<T>));
    s.rows = memory.allocate<T>(chunk * std::max(dim, dim_v));
    return s;
  }
};

/// One value head: its chunks, forward to the states and backward to the gradients.
template <class T>
struct delta_backward_head {
  const delta_backward_call<T>& call;
  const delta_backward_scratch<T>& s;
  idx_t b, h, key_head;
  stored_gradient_head<T> to_q, to_k, to_v;

  idx_t dim() const { return call.shape.dim; }
  idx_t dim_v() const { return call.shape.dim_v; }

  // Loading -----------------------------------------------------------------------------------------------------------

  /// Keys, values, beta and decays; then U and, in v, R.
  void load_keys(idx_t begin, idx_t count, const panels<T>& state) const {
    s.load(call.head(b, h), begin, count, s.k_norm);
    product(s.k_start_t, count, state, dim_v(), dim(), [&](idx_t row, idx_t col, const packet<T>& sum) {
      store<T>(s.v.at(row, col), sub(load<T>(s.v.at(row, col)), sum));
    });
    triangle_product<triangle::before>(
        s.a_t, count, s.u, dim_v(), [&](idx_t row, idx_t col, const packet<T>& sum) {
          const packet<T> difference = sub(load<T>(s.v.at(row, col)), sum);
          store<T>(s.v.at(row, col), difference);
          store<T>(s.u.at(row, col), mul(difference, broadcast<T>(s.beta[row])));
        });
  }

  /// Advances the state over the chunk that was loaded.
  void advance(idx_t count, const panels<T>& state) const {
    pass_chunk(s.decay, s.k_end, s.u, dim_v(), count, state);
  }

  void load_queries(idx_t begin, idx_t count) const {
    load_delta_rows(call.q.head(b, key_head), begin, count, call.unit_norm_eps, s.q, s.q_t, s.q_norm);
    if (s.decay.kind != decay_kind::none) s.decay.from_start(s.q, count, s.q_start);
    const stored_matrix<T> d = call.d_out.head(b, h);
    d.access->pack_panels(d, begin, count, s.d_out.data);
    each_packet(
        count, dim_v(), [&](idx_t, idx_t, const auto& x) { return mul(x, broadcast<T>(call.scale)); }, s.d_out,
        s.d_out);
    transpose_panels(s.d_out, count, dim_v(), s.d_out_t);
  }

  // The chunk ---------------------------------------------------------------------------------------------------------

  /// `state` is the one before the chunk; d_state is the gradient of the state after it, and becomes that of the state
  /// before it.
  void back(idx_t begin, idx_t count, const panels<T>& state, const panels<T>& d_state) const {
    load_keys(begin, count, state);
    load_queries(begin, count);
    transpose_panels(s.u, count, dim_v(), s.u_t);
    if (call.of_queries() || call.of_keys()) transpose_panels(state, dim(), dim_v(), s.s_t);
    if (call.of_queries() || call.of_keys()) pair_product(s.d_out_t, s.u_t, count, dim_v(), write_to(s.dp));
    if (call.of_queries())
      product(s.d_out_t, count, s.s_t, dim(), dim_v(), [&](idx_t row, idx_t col, const packet<T>& sum) {
        store<T>(s.dq.at(row, col), mul(sum, s.decay.start(row, col)));
      });
    if (call.reverse()) back_keys(count, d_state);
    pair_gradients<T>{s.decay, s.pairs, s.q, s.k, s.dp, s.dp_t, s.da, s.da_t, s.dq, s.dk_row, s.dk_col, count,
                      call.of_queries(), call.of_keys()}
        .run();
    if (call.d_log_decay) store_decays(begin, count, state, d_state);
    if (call.reverse()) back_state(count, d_state);
    if (to_q) store_rows(s.dq, s.q, s.q_norm, to_q, begin, count);
    if (to_k) {
      each_packet(
          count, dim(), [](idx_t, idx_t, const auto& x, const auto& y) { return add(x, y); }, s.dk_row, s.dk_row,
          s.dk_col);
      store_rows(s.dk_row, s.k, s.k_norm, to_k, begin, count);
    }
    if (to_v) store_rows(s.y, to_v, begin, count);
    if (call.d_beta)
      for (idx_t t = 0; t < count; ++t)
        store_gradient(call.d_beta(b, h, begin + t), dot_rows(s.x, s.v, t, dim_v()), call.accumulate);
  }

  /// X and Y, and the gradients of the keys through the states.
  void back_keys(idx_t count, const panels<T>& d_state) const {
    pair_products(s.decay, s.pairs, s.q, s.q_t, s.k, s.k_t, count, triangle::up_to, s.p);
    triangle_product<triangle::from>(s.p, count, s.d_out, dim_v(), write_to(s.x));
    if (s.decay.kind != decay_kind::none) transpose_panels(s.k_end, count, dim(), s.k_end_t);
    product(s.k_end_t, count, d_state, dim_v(), dim(), add_to(s.x));
    triangle_product<triangle::after>(s.a, count, s.y, dim_v(), [&](idx_t row, idx_t col, const packet<T>& sum) {
      const packet<T> x = sub(load<T>(s.x.at(row, col)), sum);
      store<T>(s.x.at(row, col), x);
      store<T>(s.y.at(row, col), mul(x, broadcast<T>(s.beta[row])));
    });
    if (!call.of_keys()) return;
    transpose_panels(s.y, count, dim_v(), s.y_t);
    transpose_panels(d_state, dim(), dim_v(), s.ds_t);
    pair_product(s.y_t, s.u_t, count, dim_v(),
                 [&](idx_t i, idx_t j, const packet<T>& sum) { store<T>(s.da.at(i, j), sub(zero<T>(), sum)); });
    product(s.y_t, count, s.s_t, dim(), dim_v(), [&](idx_t row, idx_t col, const packet<T>& sum) {
      store<T>(s.dk_row.at(row, col), mul(sub(zero<T>(), sum), s.decay.start(row, col)));
    });
    product(s.u_t, count, s.ds_t, dim(), dim_v(), write_to(s.dk_col));
    if (s.decay.kind != decay_kind::none) s.decay.to_end(s.dk_col, count, s.dk_col);
    for (idx_t d = 0; call.d_log_decay && d < dim(); d += width<T>) {
      packet<T> sum = zero<T>();
      for (idx_t t = 0; t < count; ++t) sum = fma(load<T>(s.k.at(t, d)), load<T>(s.dk_col.at(t, d)), sum);
      store<T>(s.d_last + d, sum);
    }
  }

  void back_state(idx_t count, const panels<T>& d_state) const {
    pass_chunk(s.decay, s.q_start, s.d_out, dim_v(), count, d_state);
    product(s.k_start, dim(), s.y, dim_v(), count, [&](idx_t row, idx_t col, const packet<T>& sum) {
      T* const to = d_state.at(row, col);
      store<T>(to, sub(load<T>(to), sum));
    });
  }

  // Storing -----------------------------------------------------------------------------------------------------------

  void store_rows(const panels<T>& x, const stored_gradient_head<T>& to, idx_t begin, idx_t count) const {
    const idx_t cols = to.to.cols;
    for (idx_t t = 0; t < count; ++t)
      for (idx_t col = 0; col < cols; col += panel_width<T>)
        std::copy_n(x.at(t, col), std::min<idx_t>(panel_width<T>, cols - col), s.rows + t * cols + col);
    to.store_rows(s.rows, cols, begin, count);
  }
  /// The same through the norm of the rows x, which are of unit norm.
  void store_rows(const panels<T>& d, const panels<T>& x, const T* norm, const stored_gradient_head<T>& to, idx_t begin,
                  idx_t count) const {
    for (idx_t t = 0; call.unit_norm() && t < count; ++t) {
      const packet<T> along = broadcast<T>(-dot_rows(d, x, t, dim())), factor = broadcast<T>(norm[t]);
      for (idx_t col = 0; col < dim(); col += width<T>)
        store<T>(d.at(t, col), mul(factor, fma(along, load<T>(x.at(t, col)), load<T>(d.at(t, col)))));
    }
    store_rows(d, to, begin, count);
  }

  /// The sums of a chunk run from its last token to its first; the gradient of a log decay of -infinity is 0.
  void store_decays(idx_t begin, idx_t count, const panels<T>& state, const panels<T>& d_state) const {
    for (idx_t d = 0; d < dim(); ++d)
      s.d_last[d] += s.decay.whole(d, count) * dot_rows(state, d_state, d, dim_v());
    each_packet(
        count, dim(),
        [&](idx_t row, idx_t col, const auto& q, const auto& dq, const auto& k, const auto& dk) {
          return fma(q, dq, mul(k, sub(dk, load<T>(s.dk_col.at(row, col)))));
        },
        s.d_gamma, s.q, s.dq, s.k, s.dk_row);
    const bool channel = s.decay.kind == decay_kind::channel;
    T sum = T(0);  // per token
    for (idx_t d = 0; d < dim(); ++d) sum += s.d_last[d];
    for (idx_t t = count - 1; t >= 0; --t) {
      for (idx_t d = 0; d < dim(); ++d) {
        const T of_token = *s.d_gamma.at(t, d);
        sum += of_token, s.d_last[d] += of_token;
        if (channel)
          store_gradient(call.d_log_decay(b, h, begin + t, d), *s.decay.gate.at(t, d) > T(0) ? s.d_last[d] : T(0),
                         call.accumulate);
      }
      if (!channel)
        store_gradient(call.d_log_decay(b, h, begin + t, 0), s.decay.gates[t] > T(0) ? sum : T(0), call.accumulate);
    }
  }
};

}  // namespace attn::inline ATTN_ISA::detail
