// attn: the backward pass of one chunk of linear attention with decays per token or channel, a bonus, and states.
//
// With gamma the sum of the log decays in the chunk up to a token, S0 the sums before the chunk and R the gradient of
// those after it; values have a further column of ones where denominators are wanted, and so have S and R (z and y):
//
//   forward   P_ij = q_i.k_j e^(gamma_i - gamma_j) (j <= i),   [num, den] = q_start S0 + P v,   out = num n
//             S1 = diag(e^gamma_C) S0 + k_end^T v
//   n = 1 / (den + eps), and from here on d_out is [n d_out, -n d_out.out]; unnormalised just d_out
//   backward  dP = d_out v^T (j <= i),   dv = P^T d_out + k_end R,   dq and dk through the pairs, q_start and k_end
//             dS0 = diag(e^gamma_C) R + q_start^T d_out
//   decay     dgamma_i = q_i dq_i - k_i dk_i, and of the last token + sum_j k_j dk_end_j e^(..) + S0.R e^gamma_C;
//             dg_t = sum of dgamma_i over i >= t of the chunk, so that rounding does not cross chunks
//   bonus u   query i sees S_(i-1) and u k_i v_i^T: the rows of the pairs are the queries from the second one on, the
//             first one reads S0 alone, and the diagonal of P is u q_i k_i
//
// q is scale phi(q). Products with S0 and R read their rows as operands by columns: names with _t are transposed
// matrices.
#pragma once

#include <attn/kernel/detail/channel_decay_backward.hpp>
#include <attn/kernel/detail/gate_gradients.hpp>
#include <attn/kernel/detail/linear_decayed_backward_call.hpp>

namespace attn::inline ATTN_ISA::detail {

/// One head of sums: its chunks, forward to the sums and backward to the gradients.
template <class T>
struct decayed_backward_head {
  const decayed_backward_call<T>& in;
  const decayed_backward_scratch<T>& s;
  idx_t b, h;
  stored_gradient_head<T> to_k, to_v;
  T* d_bonus;  // [group][whole vectors of features], sums over tokens
  const linear_extra<T>& extra = in.extra();

  const kernel_call<T>& call() const { return in.call; }
  idx_t features() const { return in.features(); }
  idx_t dim_v() const { return in.dim_v(); }
  idx_t columns() const { return in.columns(); }
  idx_t kv_head() const { return in.call.kv_head(h); }
  bool decays() const { return s.decay.kind != decay_kind::none; }
  void clear(const panels<T>& x, idx_t rows, idx_t cols) const {
    for (idx_t col = 0; col < cols; col += panels<T>::wide) std::fill_n(x.panel(col), rows * panels<T>::wide, T(0));
  }

  // Loading -----------------------------------------------------------------------------------------------------------

  /// Columns of features from rows.
  void columns_of(const panels<T>& from, idx_t count, T* columns) const {
    for (idx_t f = 0; f < features(); f += width<T>)
      for (idx_t t = 0; t < count; t += width<T>) {
        packet<T> square[width<T>];
        for (int i = 0; i < width<T>; ++i) square[i] = load<T>(from.at(t + i, f));
        transpose<T>(square);
        for (int i = 0; i < width<T>; ++i) store<T>(columns + (f + i) * kernel_chunk + t, square[i]);
      }
  }

  token_rows<T> key_rows(idx_t begin, idx_t count) const { return call().k.head(b, kv_head()).block(begin, count); }

  void load_keys(idx_t begin, idx_t count) const {
    s.load(call(), b, h, begin, count);
    for (idx_t t = 0; t < count && in.weights(); ++t) *s.v.at(t, dim_v()) = T(1);
  }

  /// Advances the sums over the keys that were loaded.
  void advance(idx_t count, const panels<T>& state) const {
    pass_chunk(s.decay, s.k_end, s.v, columns(), count, state);
  }

  // Queries -----------------------------------------------------------------------------------------------------------

  /// Rows origin + [first, count) of query head `head`, at the positions of the keys that were loaded if `pairs`.
  struct block {
    idx_t head, origin, first, count;
    bool pairs;
  };

  token_rows<T> query_rows(const block& at) const {
    return call().q.head(b, at.head).block(at.origin, at.count, at.first);
  }

  void load_queries(const block& at) const {
    clear(s.q, at.first, features());
    call().map->rows(call().q.head(b, at.head), at.origin + at.first, at.count - at.first, s.q.from_row(at.first),
                     s.map);
    if (in.dq) columns_of(s.q, at.count, s.phi);
    const packet<T> scale = broadcast<T>(extra.scale);
    each_packet(at.count, features(), [&](idx_t, idx_t, const auto& x) { return mul(x, scale); }, s.q, s.q);
    if (extra.bonus)
      for (idx_t r = 0; r < round_up(features(), width<T>); ++r)
        s.bonus[r] = r < features() ? extra.bonus(at.head, r) : T(0);
    const stored_matrix<T> d = in.d_out.head(b, at.head);
    d.access->pack_panels(d, at.origin + at.first, at.count - at.first, s.d_out.data + at.first * panels<T>::wide);
    clear(s.d_out, at.first, columns());
    for (idx_t t = 0; t < at.count && in.weights(); ++t) *s.d_out.at(t, dim_v()) = T(0);
  }

  /// The gradients of a block of queries that read the sums `state`; adds to the gradients d_state of those, and s.dk,
  /// s.dk_own and s.dv of the keys at their positions.
  void attend(const block& at, const panels<T>& state, const panels<T>& d_state) const {
    load_queries(at);
    const idx_t count = at.count, m = features(), own = extra.bonus && at.pairs ? 1 : 0, rows = count - own;
    const panels<T> q = s.q.from_row(own), dq = s.dq.from_row(own), dp = s.dp.from_row(own);
    const bool decayed = decays() && at.pairs;
    const panels<T>& q_start = decayed ? s.q_start : s.q;
    if (decayed) {
      for (idx_t col = 0; own && col < m; col += width<T>) store<T>(q_start.at(0, col), load<T>(s.q.at(0, col)));
      s.decay.from_start(q, rows, s.q_start.from_row(own));
    }
    if (at.pairs && (call().normalise || to_v)) weigh_pairs(at, rows, q);
    if (call().normalise) normalise(at, q_start, state);
    transpose_panels(s.d_out, count, columns(), s.d_out_t);
    if (in.of_queries() || in.of_keys()) {
      product(s.d_out_t, count, s.state_t, m, columns(), write_to(s.dq));
      if (in.d_decay && at.pairs)
        for (idx_t t = 0; t < rows; ++t) s.gate_queries[t] += dot_rows(q, dq, t, m);
      if (decayed) s.decay.from_start(dq, rows, dq);
      if (at.pairs) {
        pair_product(s.d_out_t, s.v_t, count, columns(), write_to(s.dp));
        for (idx_t t = 0; t < count && own; ++t) s.diagonal[t] = t < at.first ? T(0) : *s.dp.at(t, t);
        if (in.d_decay) add_gate_pairs(rows, q, dp);
        channel_decay_backward<T>{s.decay, s.pairs, q, s.k, dp, s.dp_t, dq, s.dk, rows, true, in.of_keys()}.run();
        if (in.d_log_decay)
          each_packet(
              rows, m, [](idx_t, idx_t, const auto& sum, const auto& x, const auto& d) { return fma(x, d, sum); },
              s.d_gamma, s.d_gamma, q, dq);
        if (own) add_bonus(at);
      }
    }
    if (to_v && at.pairs) triangle_product<triangle::from>(s.p, count, s.d_out, columns(), add_to(s.dv));
    if (in.reverse())
      product(q_start, m, s.d_out, columns(), count, add_to(d_state));
    if (const auto to_q = in.dq.head(b, at.head)) {
      const packet<T> scale = broadcast<T>(extra.scale);
      each_packet(count, m, [&](idx_t, idx_t, const auto& x) { return mul(x, scale); }, s.dq, s.dq);
      columns_of(s.dq, count, s.d_phi);
      in.map.back_to({query_rows(at), b * call().heads + h, false, at.first, at.origin, s.phi, s.d_phi}, to_q, s.dx,
                     nullptr, s.map);
    }
  }

  /// P, with the bonus on its diagonal.
  void weigh_pairs(const block& at, idx_t rows, const panels<T>& q) const {
    if (s.decay.kind != decay_kind::channel) transpose_panels(q, rows, features(), s.q_t);
    pair_products(s.decay, s.pairs, q, s.q_t, s.k, s.k_t, rows, triangle::up_to, s.p.from_row(at.count - rows));
    for (idx_t t = 0; t < at.count && extra.bonus; ++t) {
      packet<T> sums = zero<T>();
      for (idx_t r = 0; r < features(); r += width<T>)
        sums = fma(mul(load<T>(s.bonus + r), load<T>(s.q.at(t, r))), load<T>(s.k.at(t, r)), sums);
      const T sum = sum_lanes(sums);
      *s.p.at(t, t) = sum;
    }
  }

  /// d_out becomes the gradient of the numerator and the denominator.
  void normalise(const block& at, const panels<T>& q_start, const panels<T>& state) const {
    transpose_panels(q_start, at.count, features(), s.q_start_t);
    product(s.q_start_t, at.count, state, columns(), features(), write_to(s.out));
    if (at.pairs) {
      transpose_panels(s.p, at.count, at.count, s.p_t);
      triangle_product<triangle::up_to>(s.p_t, at.count, s.v, columns(), add_to(s.out));
    }
    for (idx_t t = at.first; t < at.count; ++t) {
      const T whole = *s.out.at(t, dim_v()) + call().eps;
      const T n = std::abs(whole) < least_denominator<T> ? T(0) : T(1) / whole;
      const T d = n == T(0) ? T(0) : -n * (n * dot_rows(s.out, s.d_out, t, dim_v()));  // n^2 could overflow
      for (idx_t col = 0; col < dim_v(); col += width<T>)
        store<T>(s.d_out.at(t, col), mul(load<T>(s.d_out.at(t, col)), broadcast<T>(n)));
      *s.d_out.at(t, dim_v()) = d;
    }
  }

  void add_bonus(const block& at) const {
    T* const sums = d_bonus + (at.head - h * call().group()) * round_up(features(), width<T>);
    for (idx_t r = 0; r < features(); r += width<T>) {
      const packet<T> u = load<T>(s.bonus + r);
      packet<T> du = load<T>(sums + r);
      for (idx_t t = at.first; t < at.count; ++t) {
        const packet<T> q = load<T>(s.q.at(t, r)), k = load<T>(s.k.at(t, r)), d = broadcast<T>(s.diagonal[t]);
        T *const dq = s.dq.at(t, r), *const dk = s.dk_own.at(t, r);
        store<T>(dq, fma(mul(d, u), k, load<T>(dq)));
        if (in.of_keys()) store<T>(dk, fma(mul(d, u), q, load<T>(dk)));
        du = fma(mul(d, q), k, du);
      }
      store<T>(sums + r, du);
    }
  }

  /// dP times the pairs without decays.
  void add_gate_pairs(idx_t rows, const panels<T>& q, const panels<T>& dp) const {
    transpose_panels(q, rows, features(), s.q_t);
    pair_product(s.q_t, s.k_t, rows, features(), [&](idx_t i, idx_t j, const packet<T>& sum) {
      T* const to = s.gate_pairs + i * kernel_chunk + j;
      if (i < rows && j <= i) store<T>(to, fma(sum, load<T>(dp.at(i, j)), load<T>(to)));
    });
  }

  // Keys --------------------------------------------------------------------------------------------------------------

  /// Keys [begin, begin + count), which were not loaded yet, and the queries at their positions. d_state is the
  /// gradient of the sums after them, and becomes that of the sums before them; not causal, of the sums of all keys.
  void back(idx_t begin, idx_t count, const panels<T>& state, const panels<T>& d_state) const {
    const idx_t m = features();
    load_keys(begin, count);
    const bool pairs = call().causal;
    if (in.of_queries() || in.of_keys()) {
      transpose_panels(s.v, count, columns(), s.v_t);
      if (pairs) transpose_panels(state, m, columns(), s.state_t);
    }
    if (pairs && s.decay.kind != decay_kind::channel) transpose_panels(s.k, count, m, s.k_t);
    if (in.reverse()) from_later(count, state, d_state);
    if (pairs) {
      const idx_t offset = call().lengths.keys(b) - call().lengths.queries(b);
      const idx_t first = std::max<idx_t>(offset - begin, 0);
      if (in.reverse() && decays())
        for (idx_t r = 0; r < m; ++r)
          for (idx_t col = 0; col < columns(); col += width<T>)
            store<T>(d_state.at(r, col), mul(load<T>(d_state.at(r, col)), broadcast<T>(s.decay.whole(r, count))));
      for (idx_t g = 0; g < call().group() && first < count; ++g)
        attend({h * call().group() + g, begin - offset, first, count, true}, state, d_state);
    }
    store_keys(begin, count);
  }

  /// The gradients of the keys, values and decays of the chunk by the sums after it.
  void from_later(idx_t count, const panels<T>& state, const panels<T>& d_state) const {
    const idx_t m = features();
    if (in.d_log_decay) clear(s.d_gamma, count, m);
    if (extra.bonus && in.of_keys()) clear(s.dk_own, count, m);
    if (in.d_decay) {
      std::fill_n(s.gate_pairs, kernel_chunk * kernel_chunk, T(0));
      std::fill_n(s.gate_queries, kernel_chunk, T(0));
      s.d_last[0] = T(0);  // <S, R>
      for (idx_t r = 0; r < m; ++r) s.d_last[0] += dot_rows(state, d_state, r, columns());
    }
    if (in.of_keys()) {
      transpose_panels(d_state, m, columns(), s.d_state_t);
      product(s.v_t, count, s.d_state_t, m, columns(), write_to(s.dk));
      for (idx_t t = 0; t < count && in.d_decay; ++t) s.gate_keys[t] = dot_rows(s.k, s.dk, t, m);
      if (decays()) s.decay.to_end(s.dk, count, s.dk);
    }
    if (in.d_log_decay)
      for (idx_t r = 0; r < m; ++r) {
        T sum = s.decay.whole(r, count) * dot_rows(state, d_state, r, columns());
        for (idx_t t = 0; t < count; ++t) sum += *s.k.at(t, r) * *s.dk.at(t, r);
        s.d_last[r] = sum;
      }
    if (!to_v) return;
    transpose_panels(s.k_end, count, m, s.k_end_t);
    product(s.k_end_t, count, d_state, columns(), m, write_to(s.dv));
  }

  void store_keys(idx_t begin, idx_t count) const {
    if (in.d_decay)
      gate_chunk<T>{count, false, s.decay.gates, s.decay.since_start, s.decay.pair, s.gate_pairs, s.gate_queries,
                    s.gate_keys, s.d_last[0]}
          .add_to(s.gates + begin);
    if (in.d_log_decay) store_decays(begin, count);
    if (to_k) {
      if (extra.bonus)
        each_packet(
            count, features(), [](idx_t, idx_t, const auto& x, const auto& y) { return add(x, y); }, s.dk, s.dk,
            s.dk_own);
      columns_of(s.k, count, s.phi);
      columns_of(s.dk, count, s.d_phi);
      in.map.back_to({key_rows(begin, count), b * call().heads + h, true, 0, begin, s.phi, s.d_phi}, to_k, s.dx,
                     nullptr, s.map);
    }
    if (!to_v) return;
    for (idx_t t = 0; t < count; ++t)
      for (idx_t col = 0; col < dim_v(); col += panel_width<T>)
        std::copy_n(s.dv.at(t, col), std::min<idx_t>(panel_width<T>, dim_v() - col), s.rows + t * dim_v() + col);
    to_v.store_rows(s.rows, dim_v(), begin, count);
  }

  /// The sums of a chunk run from its last token to its first; the gradient of a log decay of -infinity is 0.
  void store_decays(idx_t begin, idx_t count) const {
    const idx_t m = features();
    const bool channel = s.decay.kind == decay_kind::channel, add = in.adds(in.d_log_decay, h);
    const idx_t head = in.at(in.d_log_decay, h);
    T sum = T(0);  // per token
    for (idx_t r = 0; r < m; ++r) sum += s.d_last[r];
    for (idx_t t = count - 1; t >= 0; --t) {
      for (idx_t r = 0; r < m; ++r) {
        const T of_token = *s.d_gamma.at(t, r) - *s.k.at(t, r) * *s.dk.at(t, r);
        sum += of_token, s.d_last[r] += of_token;
        if (channel)
          store_gradient(in.d_log_decay(b, head, begin + t, r), *s.decay.gate.at(t, r) > T(0) ? s.d_last[r] : T(0),
                         add);
      }
      if (!channel)
        store_gradient(in.d_log_decay(b, head, begin + t, 0), s.decay.gates[t] > T(0) ? sum : T(0), add);
    }
  }
};

}  // namespace attn::inline ATTN_ISA::detail
