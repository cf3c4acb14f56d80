// attn: the backward pass of one chunk of a recurrence.
//
// With gamma the sum of the log decays in the chunk up to a token, S0 the state before the chunk and R1 the gradient of
// that after it, P, A, U and the decayed rows as in recurrence.hpp, and s d_out written d_out:
//
//   backward  X = P^T d_out + k_end R1,  dP = d_out U^T (j <= i),  dq and dk through P, q_start and k_end
//             R0 = diag(e^gamma_C) R1 + q_start^T d_out
//   add       dv = X
//   correct   U = beta R, R = v - start S0 - A U;  X less A^T Y, Y = beta X;  dA = -Y U^T, dv = Y, dbeta_i = X_i.R_i
//             dk through A and start, too;  R0 less start^T Y
//   low rank  X_W = P_b^T d_out + b_end R1, dP_b = d_out W^T;  Y = X_W + A^T Y, dv = X + A_k^T Y;  dA = Y W^T,
//             dA_k = Y v^T, da through A, A_k and start, db as dk;  R0 and start^T Y
//   decay     dgamma_i = q_i dq_i + k_i (dk_i by rows of A and start - dk_i by columns), and of the last token
//             + sum_j k_j dk_end_j e^(..) + S0.R1 e^gamma_C; by the rule of low rank q_i dq_i + a_(i+1) da_(i+1) less
//             k_i dk_i and b_i db_i;
//             dg_t = sum of dgamma_i over i >= t of the chunk, so that rounding does not cross chunks
//
// By the rule that adds, values have a further column of ones where denominators are wanted, and so have S and R (z and
// y). With n = scale / (scale den + eps), d_out is [n d_out, -n d_out.out]. With a bonus u query i sees S_(i-1) and
// u k_i v_i^T: the rows of the scores are the queries from the second one on, the first one reads S0 alone, and the
// diagonal of P is u q_i k_i.
//
// Products with S0 and R1 read their rows as operands by columns: names with _t are transposed matrices.
#pragma once

#include <attn/kernel/detail/chunk_decay_backward.hpp>
#include <attn/kernel/detail/gate_gradients.hpp>
#include <attn/kernel/detail/recurrence_chunk_backward.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// One head of the states: its chunks, forward to the states and backward to the gradients.
template <rule R, class T>
struct recurrence_backward_kernel : recurrence_backward_queries<R, T> {
  static constexpr bool corrects = R == rule::correct, low_rank = R == rule::low_rank, reads = reads_state<R>;
  using base = recurrence_backward_queries<R, T>;
  using base::b, base::call, base::columns, base::decays, base::dim_v, base::features, base::h, base::in,
      base::parameters, base::s;

  stored_gradient_head<T> to_q, to_k, to_v;  // of queries only by the rules that read the state
  T* d_bonus;                                // [group][whole vectors of features], sums over tokens
  bool state_known = false;                  // X (of v, by the rule of low rank of W) and R0 are known

  bool of_features() const { return in.of_queries() || in.of_keys(); }

  // Keys --------------------------------------------------------------------------------------------------------------

  /// What is known of a chunk only with the state before it: R, in v, or W.
  panels<T> solved() const { return low_rank ? s.w : s.v; }

  /// Keys, values and decays: what does not need the state.
  void load_keys(idx_t begin, idx_t count) const { s.load(call, b, h, begin, count, s.k_norm); }

  /// By the rule that corrects U and, in v, R; by that of low rank W; of the first `cols` columns. R or W may be known.
  [[gnu::noinline]] void solve(idx_t begin, idx_t count, const panels<T>& state, idx_t cols,
                               const panels<T>* known = nullptr) const {
    if (reads && known) {
      if (!state_known) std::copy_n(known->data, kernel_chunk * round_up(columns(), panels<T>::wide), solved().data);
      if (corrects)
        each_packet(
            count, columns(), [&](idx_t row, idx_t, const auto& x) { return mul(x, broadcast<T>(s.beta[row])); }, s.u,
            s.v);
    } else if constexpr (corrects) {
      product(s.start_t, count, state, cols, features(), [&](idx_t row, idx_t col, const packet<T>& sum) {
        store<T>(s.v.at(row, col), sub(load<T>(s.v.at(row, col)), sum));
      });
      triangle_product<triangle::before>(s.a_t, count, s.u, cols, [&](idx_t row, idx_t col, const packet<T>& sum) {
        const packet<T> difference = sub(load<T>(s.v.at(row, col)), sum);
        store<T>(s.v.at(row, col), difference);
        store<T>(s.u.at(row, col), mul(difference, broadcast<T>(s.beta[row])));
      });
    } else if constexpr (low_rank) {
      s.read_state(count, state, false, s.w, cols);
    } else {
      for (idx_t t = 0; t < count && in.weights(); ++t) *s.v.at(t, dim_v()) = call.hides(b, begin + t) ? T(0) : T(1);
    }
  }

  /// The state after the keys from `begin` on, which were loaded, and their values taken, by that before them.
  void advance(idx_t begin, idx_t count, const panels<T>& state, idx_t cols, const panels<T>& after) const {
    solve(begin, count, state, cols);
    row_prefetcher<> prefetch;
    if (!state_known) prefetch = call.prefetch_keys(b, h, begin + count);
    s.pass(count, low_rank ? s.w : s.u, 0, cols, state, false, after, prefetch);
  }

  /// Keys [begin, begin + count), which were loaded, and the queries at their positions. d_state is the gradient of the
  /// state after them, and becomes that of the state before them; not causal, of the sums of all keys.
  void back(idx_t begin, idx_t count, const panels<T>& state, const panels<T>& d_state,
            const panels<T>* known = nullptr) const {
    const idx_t m = features();
    if (!known) s.take_values(count, columns());
    solve(begin, count, state, columns(), known);
    if (of_features()) {
      transpose_panels(s.u, count, columns(), s.u_t);
      if (low_rank) transpose_panels(s.w, count, columns(), s.w_t);
      if (call.causal) transpose_panels(state, m, columns(), s.state_t);
    }
    if (!reads && (call.causal || !decays())) s.transpose_keys(count);
    if (in.reverse()) from_later(begin, count, state, d_state);
    if (call.causal) {
      const idx_t offset = call.lengths.keys(b) - call.lengths.queries(b), first = std::max<idx_t>(offset - begin, 0);
      if (in.reverse() && decays() && (first >= count || call.group() == 0))
        each_packet(
            m, columns(),
            [&](idx_t r, idx_t, const auto& x) { return mul(x, broadcast<T>(s.decay.whole(r, count))); }, d_state,
            d_state);
      for (idx_t g = 0; g < call.group() && first < count; ++g)
        attend({h * call.group() + g, begin - offset, first, count, true}, state, d_state);
    }
    store_keys(begin, count);
  }

  /// X, and the gradients of the keys and decays of the chunk, by the state after it.
  void from_later(idx_t begin, idx_t count, const panels<T>& state, const panels<T>& d_state) const {
    const idx_t m = features();
    if (!reads && in.d_log_decay) this->clear(s.d_gamma, count, m);
    if (in.d_gate) {
      std::fill_n(s.gate_scores, kernel_chunk * kernel_chunk, T(0));
      std::fill_n(s.gate_queries, kernel_chunk, T(0));
      s.d_last[0] = T(0);  // <S, R>
      for (idx_t r = 0; r < m; ++r) s.d_last[0] += dot_rows(state, d_state, r, columns());
    }
    if (in.of_keys()) {
      transpose_panels(d_state, m, columns(), s.d_state_t);
      product(s.u_t, count, s.d_state_t, m, columns(), write_to(s.dk));
      for (idx_t t = 0; t < count && in.d_gate; ++t) s.gate_keys[t] = dot_rows(s.k, s.dk, t, m);
      if (decays()) s.decay.to_end(s.dk, count, s.dk);
      if constexpr (low_rank) {
        product(s.w_t, count, s.d_state_t, m, columns(), write_to(s.db));
        if (decays()) s.decay.to_end(s.db, count, s.db);
      }
      if (parameters.bonus) this->clear(s.dk_bonus, count, m);
    }
    if (in.d_log_decay) {
      for (idx_t r = 0; r < m; r += width<T>) {
        packet<T> sum = zero<T>();
        for (idx_t t = 0; t < count; ++t) sum = fma(load<T>(s.k.at(t, r)), load<T>(s.dk.at(t, r)), sum);
        for (idx_t t = 0; low_rank && t < count; ++t)
          sum = fma(load<T>(s.writes.at(t, r)), load<T>(s.db.at(t, r)), sum);
        store<T>(s.d_last + r, sum);
      }
      for (idx_t r = 0; r < m; ++r) s.d_last[r] += s.decay.whole(r, count) * dot_rows(state, d_state, r, columns());
    }
    if ((!reads && !to_v) || (corrects && state_known)) return;
    if (decays()) transpose_panels(s.k_end, count, m, s.k_end_t);
    row_prefetcher<> prefetch;
    if (!state_known) prefetch = call.prefetch_keys(b, h, call.causal ? begin - kernel_chunk : begin + kernel_chunk);
    product(s.k_end_t, count, d_state, columns(), m, [&](idx_t row, idx_t col, const packet<T>& sum) {
      fetch_rows<T>(prefetch, row, col);
      T* const x = s.x.at(row, col);
      store<T>(x, state_known ? add(load<T>(x), sum) : sum);
    });
    if constexpr (low_rank)
      if (!state_known) product(writes_end_t(count), count, d_state, columns(), m, write_to(s.y));
  }
  /// The ends of the rows with which tokens write, transposed: by the rule of low rank b.
  panels<T> writes_end_t(idx_t count) const {
    if (decays()) transpose_panels(low_rank ? s.writes_end : s.k_end, count, features(), s.k_end_t);
    return low_rank && !decays() ? s.writes_t : s.k_end_t;
  }

  // Queries -----------------------------------------------------------------------------------------------------------

  /// The gradients of a block of queries that read the state; adds to the gradients d_state of that, and those of the
  /// keys at their positions.
  void attend(const recurrence_block& at, const panels<T>& state, const panels<T>& d_state) const {
    if (!state_known) this->load_queries(at);
    const idx_t count = at.count, m = features(), own = at.shift(call), rows = count - own;
    const panels<T> q = s.q.from_row(own), dq = s.dq.from_row(own), dp = s.dp.from_row(own);
    const bool decayed = decays() && at.own_keys, of_state = in.reverse() && !state_known;
    const bool of_values = reads ? of_state : bool(to_v);
    const panels<T>& q_start = decayed ? s.q_start : s.q;
    if (decayed && !state_known) {
      for (idx_t col = 0; own && col < m; col += width<T>) store<T>(q_start.at(0, col), load<T>(s.q.at(0, col)));
      s.decay.from_start(q, rows, s.q_start.from_row(own));
    }
    if (at.own_keys && (call.normalise || of_values)) this->load_scores(at, rows, q);
    if constexpr (!reads)
      if (call.normalise) this->normalise(at, q_start, state);
    if (of_features()) {
      transpose_panels(s.d_out, count, columns(), s.d_out_t);
      row_prefetcher<> prefetch;
      if (const idx_t end = at.origin, begin = std::max<idx_t>(end - kernel_chunk, 0); reads && !state_known) {
        call.fetch(prefetch, call.q.head(b, call.query_head(at.head)), begin, end);
        call.fetch(prefetch, in.d_out.head(b, at.head), begin, end);
      }
      product(s.d_out_t, count, s.state_t, m, columns(), [&](idx_t row, idx_t col, const packet<T>& sum) {
        if (reads) fetch_rows<T>(prefetch, row, col);
        const bool times_decay = decayed && !in.d_gate && row >= own;
        store<T>(s.dq.at(row, col), times_decay ? mul(sum, s.decay.start(row - own, col)) : sum);
      });
      if (in.d_gate && at.own_keys) {
        for (idx_t t = 0; t < rows; ++t) s.gate_queries[t] += dot_rows(q, dq, t, m);
        s.decay.from_start(dq, rows, dq);
      }
      if (at.own_keys) score_product(s.d_out_t, s.u_t, count, columns(), write_to(s.dp));
      if (low_rank) score_product(s.d_out_t, s.w_t, count, columns(), write_to(s.dp_b));
      if constexpr (!reads) {
        for (idx_t t = 0; t < count && own; ++t) s.diagonal[t] = t < at.first ? T(0) : *s.dp.at(t, t);
        if (in.d_gate && at.own_keys) this->add_gate_scores(rows, q, dp);
      }
    }
    if (of_values && at.own_keys) triangle_product<triangle::from>(s.p, count, s.d_out, columns(), add_to(s.x));
    if (low_rank && of_state) triangle_product<triangle::from>(s.p_b, count, s.d_out, columns(), add_to(s.y));
    if (of_state) {
      const bool passes = at.own_keys && at.head == h * call.group();  // the state of the chunk, once
      product(q_start, m, s.d_out, columns(), count, [&](idx_t row, idx_t col, const packet<T>& sum) {
        T* const to = d_state.at(row, col);
        store<T>(to, fma(load<T>(to), broadcast<T>(passes ? s.decay.whole(row, count) : T(1)), sum));
      });
    }
    if constexpr (reads)
      if (in.reverse()) {
        if (!state_known) {
          solve_back(count, columns());
          product(s.start, features(), s.y, columns(), count, [&](idx_t row, idx_t col, const packet<T>& sum) {
            T* const to = d_state.at(row, col);
            store<T>(to, corrects ? sub(load<T>(to), sum) : add(load<T>(to), sum));
          });
        } else if (corrects)
          each_packet(
              count, columns(), [&](idx_t row, idx_t, const auto& x) { return mul(x, broadcast<T>(s.beta[row])); },
              s.y, s.x);
        if (low_rank) triangle_product<triangle::after>(s.a_k, count, s.y, columns(), add_to(s.x));
        if (in.of_keys()) reads_back(count);
      }
    if (of_features() && at.own_keys) {
      score_back({q, dq, rows}, dp);
      if (in.d_log_decay) add_decays(rows, q, dq);
      if constexpr (!reads)
        if (own) add_bonus(at);
    }
    store_queries(at);
  }

  /// Adds the terms of the gradients of the decays that are known with those of the queries: by the rules that read the
  /// state, whose queries are of one head, all.
  void add_decays(idx_t rows, const panels<T>& q, const panels<T>& dq) const {
    if constexpr (corrects)
      each_packet(
          rows, features(),
          [&](idx_t row, idx_t col, const auto& x, const auto& d, const auto& k, const auto& dk) {
            return fma(x, d, mul(k, sub(load<T>(s.d_reads.at(row, col)), dk)));
          },
          s.d_gamma, q, dq, s.k, s.dk);
    else if constexpr (low_rank)
      each_packet(
          rows, features(),
          [&](idx_t row, idx_t col, const auto& x, const auto& d, const auto& k, const auto& dk) {
            const packet<T> of_b = mul(load<T>(s.writes.at(row, col)), load<T>(s.db.at(row, col)));
            const packet<T> sum = sub(fma(x, d, mul(k, sub(zero<T>(), dk))), of_b);
            if (row + 1 == rows) return sum;
            return fma(load<T>(s.reads.at(row + 1, col)), load<T>(s.d_reads.at(row + 1, col)), sum);
          },
          s.d_gamma, q, dq, s.k, s.dk);
    else
      each_packet(
          rows, features(), [](idx_t, idx_t, const auto& sum, const auto& x, const auto& d) { return fma(x, d, sum); },
          s.d_gamma, s.d_gamma, q, dq);
  }

  void add_bonus(const recurrence_block& at) const {
    T* const sums = d_bonus + (at.head - h * call.group()) * round_up(features(), width<T>);
    for (idx_t r = 0; r < features(); r += width<T>) {
      const packet<T> u = load<T>(s.bonus + r);
      packet<T> du = load<T>(sums + r);
      for (idx_t t = at.first; t < at.count; ++t) {
        const packet<T> q = load<T>(s.q.at(t, r)), k = load<T>(s.k.at(t, r)), d = broadcast<T>(s.diagonal[t]);
        T *const dq = s.dq.at(t, r), *const dk = s.dk_bonus.at(t, r);
        store<T>(dq, fma(mul(d, u), k, load<T>(dq)));
        if (in.of_keys()) store<T>(dk, fma(mul(d, u), q, load<T>(dk)));
        du = fma(mul(d, q), k, du);
      }
      store<T>(sums + r, du);
    }
  }

  /// Y of the first `cols` columns. By the rule of low rank y is the gradient of W, x that of v.
  [[gnu::noinline]] void solve_back(idx_t count, idx_t cols) const {
    if constexpr (corrects)
      triangle_product<triangle::after>(s.a, count, s.y, cols, [&](idx_t row, idx_t col, const packet<T>& sum) {
        const packet<T> x = sub(load<T>(s.x.at(row, col)), sum);
        store<T>(s.x.at(row, col), x);
        store<T>(s.y.at(row, col), mul(x, broadcast<T>(s.beta[row])));
      });
    else
      triangle_product<triangle::after>(s.a, count, s.y, cols, add_to(s.y));
  }
  /// dA, and the gradients of the keys, or of a, through start.
  void reads_back(idx_t count) const {
    transpose_panels(s.y, count, columns(), s.y_t);
    if constexpr (corrects) {
      score_product(s.y_t, s.u_t, count, columns(),
                    [&](idx_t i, idx_t j, const packet<T>& sum) { store<T>(s.da.at(i, j), sub(zero<T>(), sum)); });
      product(s.y_t, count, s.state_t, features(), columns(), [&](idx_t row, idx_t col, const packet<T>& sum) {
        store<T>(s.d_reads.at(row, col), mul(sub(zero<T>(), sum), s.decay.start(row, col)));
      });
    } else {
      score_product(s.y_t, s.u_t, count, columns(), write_to(s.da_k));
      score_product(s.y_t, s.w_t, count, columns(), write_to(s.da));
      product(s.y_t, count, s.state_t, features(), columns(), [&](idx_t row, idx_t col, const packet<T>& sum) {
        store<T>(s.d_reads.at(row, col), row > 0 ? mul(sum, s.decay.start(row - 1, col)) : sum);
      });
    }
  }
  /// The gradients of q and of the keys through the scores, dp being that of P.
  void score_back(const score_side<T>& q, const panels<T>& dp) const {
    const bool of_q = in.of_queries(), of_others = in.of_keys();
    const score_side<T> k{s.k, s.dk, q.count};
    if constexpr (corrects)
      score_gradients<2, 1, true, T>{
          s.decay, s.scores, {q, {s.k, s.d_reads, q.count}}, {k}, {{dp}, {s.da}}, {{s.dp_t}, {s.da_t}}, of_q, of_others}
          .run();
    else if constexpr (low_rank)
      score_gradients<2, 2, false, T>{s.decay, s.scores,
                                      {q, {s.reads.from_row(1), s.d_reads.from_row(1), q.count - 1}},
                                      {k, {s.writes, s.db, q.count}},
                                      {{dp, s.dp_b}, {s.da_k.from_row(1), s.da.from_row(1)}},
                                      {{s.dp_t, s.dp_b_t}, {s.da_k_t, s.da_t}}, of_q, of_others}
          .run();
    else
      score_gradients<1, 1, false, T>{s.decay, s.scores, {q}, {k}, {{dp}}, {{s.dp_t}}, of_q, of_others}.run();
  }

  // Storing -----------------------------------------------------------------------------------------------------------

  void store_queries(const recurrence_block& at) const {
    if constexpr (reads) {
      if (to_q) this->store_unit_rows(s.dq, s.q, s.q_norm, to_q, at.origin, at.count);
    } else if (const auto to = in.dq.head(b, at.head)) {
      this->store_features(s.q, s.dq, call.q.head(b, at.head).block(at.origin, at.count, at.first), false, at.first,
                     at.origin, to);
    }
  }
  void store_keys(idx_t begin, idx_t count) const {
    if constexpr (!reads)
      if (in.d_gate)
        gate_chunk<T>{count, false, s.decay.gates, s.decay.since_start, s.decay.gaps, s.gate_scores, s.gate_queries,
                      s.gate_keys, s.d_last[0]}
            .add_to(s.gates + begin);
    if (in.d_log_decay) this->store_decays(begin, count);
    if (to_k && (corrects || parameters.bonus))
      each_packet(
          count, features(), [](idx_t, idx_t, const auto& x, const auto& y) { return add(x, y); }, s.dk, s.dk,
          corrects ? s.d_reads : s.dk_bonus);
    for (idx_t t = 0; t < count && call.key_mask; ++t)  // 0 already, if no gradient is NaN
      if (call.hides(b, begin + t)) {
        for (const panels<T>* x : {&s.dk, &s.d_reads, &s.db}) clear_row(*x, t, features());
        for (const panels<T>* x : {&s.x, &s.y}) clear_row(*x, t, columns());
      }
    if (to_k) {
      if constexpr (reads)
        this->store_unit_rows(s.dk, s.k, s.k_norm, to_k, begin, count);
      else if (auto rows = call.k.head(b, call.kv_head(h)).block(begin, count); call.replace_hidden(b, begin, rows))
        this->store_features(s.k, s.dk, rows, true, 0, begin, to_k);
      else
        to_k.clear_rows(begin, begin + count);
    }
    for (const auto& [to, x] : {std::pair{&in.da, &s.d_reads}, std::pair{&in.db, &s.db}})
      if (low_rank && *to) this->store_rows(*x, to->head(b, h), begin, count);
    if (to_v) this->store_rows(low_rank ? s.x : s.y, to_v, begin, count);
    for (idx_t t = 0; in.d_beta && t < count; ++t)
      store_gradient(in.d_beta(b, h, begin + t), call.hides(b, begin + t) ? T(0) : dot_rows(s.x, s.v, t, dim_v()),
                     in.accumulate);
  }
};

}}}  // namespace attn::ATTN_ISA::detail
