// attn: recurrences over a matrix state S: linear attention with decays per channel, a bonus, a scale or states, the
// delta rule, and dplr. A rule says how a token changes the state; chunks of tokens are computed by products. Whole
// heads: recurrence_run.hpp.
//
// With gamma the sum of the log decays in the chunk up to a token, and S the state before the chunk:
//
//   P_ij = q_i.k_j e^(gamma_i - gamma_j), j <= i        q_start_i = q_i e^gamma_i
//   A_ij = k_i.k_j e^(gamma_i - gamma_j), j < i         start_i   = k_i e^gamma_i
//                                                       k_end_j   = k_j e^(gamma_last - gamma_j)
//
//   1. U   = v                                   rule::add: what each token writes to its key
//      U   = beta (v - start S - A U)            rule::correct, row by row
//   2. out = scale (q_start S + P U)
//   3. S   = e^gamma_last S + k_end^T U
//
// rule::add has q = phi(q) and k = phi(k); denominators are the same with z for S and ones for v. With a bonus u, query
// i sees S_(i-1) and u k_i v_i^T: its decays end one token earlier, and the diagonal of P is u q_i k_i.
//
// rule::low_rank has v with k, and W = a^T S_(i-1) with b, for which there are P, A and the rows of the end, too. a_i
// reads the state before the decay of its token: A_ij = a_i.b_j e^(gamma_(i-1) - gamma_j), start_i = a_i e^gamma_(i-1),
//
//   1. W   = start S + A_k v + A W               row by row
//   2. out = scale (q_start S + P_b W + P v)
//   3. S   = e^gamma_last S + b_end^T W + k_end^T v
//
// Decays are multiplied, never divided (chunk_decay.hpp). Separate from sums_run.hpp, because calls without decays do
// not need a second copy of their rows: with decays per channel a call takes 1.3 to 1.4 times as long. Products need
// their left operand by columns: names with _t are transposed matrices.
#pragma once

#include <attn/kernel/detail/recurrence_keys.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The state of one head: S, and z where the call has denominators. If `empty` both are 0, and S was not written.
template <class T>
struct recurrence_state {
  panels<T> values;
  T* weights = nullptr;
  bool empty = true;
};

/// S and, where given, z = what is given of head h, or 0.
template <class T>
[[gnu::noinline]] void load_state(const kernel_call<T>& call, const tensor_view<const T>& values,
                                  const tensor_view<const T, 3>& weights, idx_t b, idx_t h, idx_t cols,
                                  const panels<T>& to, T* z, idx_t z_stride) {
  const idx_t m = call.features();
  std::fill_n(to.data, to.capacity * round_up(cols, panels<T>::wide), T(0));
  const auto x = values ? head_of(values, b, call.parameter_head(values.extent(1), h)) : matrix_view<const T>{};
  for (idx_t r = 0; r < m; ++r) {
    for (idx_t d = 0; d < x.cols; ++d) *to.at(r, d) = x.row(r)[d * x.col_stride];
    if (z) z[r * z_stride] = weights ? weights(b, call.parameter_head(weights.extent(1), h), r) : T(0);
  }
}

/// Scratch memory of one worker, or of a chunk of a wave.
template <rule R, class T>
struct recurrence_scratch : recurrence_keys<R, T> {
  panels<T> q, q_start, q_t, q_start_t;  // [token][feature]; transposed
  panels<T> out, p, p_t, p_b, p_b_t;     // [token][column]; [token][token]
  T* factors;                            // of the rows of out

  [[gnu::noinline]] static recurrence_scratch layout(const chunk_memory& memory, const kernel_call<T>& call) {
    const idx_t m = call.features(), own = call.recurrence.bonus ? 1 : 0, chunk = kernel_chunk;
    const bool decayed = call.decays() != decay_kind::none;
    arena& kept = memory.of(kept_for::pass);
    recurrence_scratch s;
    static_cast<recurrence_keys<R, T>&>(s) =
        recurrence_keys<R, T>::layout(memory, call, call.shape.dim_v, call.map ? call.map->scratch_size : 0);
    allocate_panels(memory.own, chunk + own, m, {&s.q});  // with a bonus, rows are also read beginning with the second
    s.q.capacity = chunk;
    allocate_panels(decayed ? memory.own : kept, m, chunk, {&s.q_t});
    s.q_start = s.q, s.q_start_t = s.q_t;
    if (decayed && !reads_state<R>) allocate_panels(memory.own, chunk + own, m, {&s.q_start});
    if (own || decayed) allocate_panels(kept, m, chunk + own, {&s.q_start_t});
    allocate_panels(memory.own, chunk, call.shape.dim_v, {&s.out});
    if constexpr (reads_state<R>) {  // those of keys are not read any more
      if (decayed) s.q_start = s.start;
      s.p = s.a, s.p_b = s.a_k;
    } else {
      allocate_panels(memory.own, chunk + own, chunk, {&s.p});
    }
    allocate_panels(kept, chunk, chunk + own, {&s.p_t});
    if (R == rule::low_rank) allocate_panels(kept, chunk, chunk, {&s.p_b_t});
    s.factors = kept.allocate<T>(chunk);
    return s;
  }
};

/// Rows origin + [first, count) of query head `head`, which read the state and, with `own_keys`, are at the positions
/// of the keys that were loaded.
struct recurrence_block {
  idx_t head, origin, first, count;
  bool own_keys;

  /// How many keys before its own a query with a bonus sees last.
  template <class T>
  idx_t shift(const kernel_call<T>& call) const { return call.recurrence.bonus && own_keys ? 1 : 0; }
};

/// A chunk of head h of the states. solve(), answer() and update() may be called for some of the value columns, from
/// `col` on. Calls that threads share compute the same with the same code, so that sums are contracted alike.
template <rule R, class T>
struct recurrence_kernel {
  const kernel_call<T>& call;
  const recurrence_scratch<R, T>& s;
  idx_t b, h;
  idx_t col = 0, cols = call.shape.dim_v;

  idx_t features() const { return s.decay.dim; }
  panels<T> values() const { return s.v.from_col(col); }
  panels<T> corrections() const { return s.w.from_col(col); }

  /// Queries, and their scores in p and p_t; factors are the sums of the scores where there are denominators, else the
  /// scale.
  [[gnu::noinline]] void load_queries(const recurrence_block& at) const {
    const idx_t m = features(), own = at.shift(call), rows = at.count - own;
    const bool decayed = at.own_keys && s.decay.kind != decay_kind::none;
    for (idx_t c = 0; c < m; c += panels<T>::wide) std::fill_n(s.q.panel(c), at.first * panels<T>::wide, T(0));
    load_rows<R>(call, call.q.head(b, call.query_head(at.head)), at.origin + at.first, at.count - at.first,
                 s.q.from_row(at.first), s.map);
    const panels<T> q = s.q.from_row(own);
    if (decayed) {
      for (idx_t c = 0; own && c < m; c += width<T>) store<T>(s.q_start.at(0, c), load<T>(s.q.at(0, c)));
      s.decay.from_start(q, rows, s.q_start.from_row(own));
    }
    transpose_panels(decayed ? s.q_start : s.q, at.count, m, s.q_start_t);
    std::fill_n(s.factors, kernel_chunk, call.normalise ? T(0) : call.recurrence.scale);
    if (!at.own_keys) return;
    if (s.decay.kind != decay_kind::channel && s.q_t.data != s.q_start_t.data) transpose_panels(q, rows, m, s.q_t);
    chunk_scores(s.decay, s.scores, q, s.q_t, s.k, s.k_t, rows, triangle::up_to, s.p.from_row(own));
    if constexpr (R == rule::add) {
      for (idx_t t = 0; own && t < at.count; ++t) {
        const auto& bonus = call.recurrence.bonus;
        T sum = T(0);
        for (idx_t r = 0; r < m; ++r) sum += bonus(at.head, r) * *s.q.at(t, r) * *s.k.at(t, r);
        *s.p.at(t, t) = sum;
      }
      for (idx_t t = 0; t < at.count && call.normalise; ++t) s.factors[t] = sum_before(s.p, t);
    }
    transpose_panels(s.p, at.count, at.count, s.p_t, true);
    if constexpr (R == rule::low_rank) {
      chunk_scores(s.decay, s.scores, q, s.q_t, s.writes, s.writes_t, rows, triangle::up_to, s.p_b);
      transpose_panels(s.p_b, at.count, at.count, s.p_b_t, true);
    }
  }

  /// values() = U, or corrections() = W.
  [[gnu::noinline]] void solve(idx_t count, const recurrence_state<T>& before) const {
    if constexpr (R == rule::correct) {
      const panels<T> u = values();
      const auto write = [&](idx_t row, idx_t c, const packet<T>& read) {
        store<T>(u.at(row, c), mul(sub(load<T>(u.at(row, c)), read), broadcast<T>(s.beta[row])));
      };
      if (before.empty)
        for (idx_t c = 0; c < cols; c += width<T>)
          for (idx_t row = 0; row < count; ++row) write(row, c, zero<T>());
      else
        product(s.start_t, count, before.values, cols, features(), write);
      triangle_product<triangle::before>(s.a_t, count, u, cols, [&](idx_t row, idx_t c, const packet<T>& sum) {
        store<T>(u.at(row, c), sub(load<T>(u.at(row, c)), mul(sum, broadcast<T>(s.beta[row]))));
      });
    } else if constexpr (R == rule::low_rank) {
      s.read_state(count, before.values, before.empty, corrections(), cols);
    }
  }

  /// Computes and writes the rows of out.
  [[gnu::noinline]] void answer(const recurrence_block& at, const recurrence_state<T>& before,
                                row_prefetcher<>& prefetch) const {
    const panels<T> to = s.out.from_col(col);
    const stored_matrix<T> out = call.out.head(b, at.head);
    if (call.normalise) divide_factors(at.count, before);
    const auto factor = [&](idx_t row) { return broadcast<T>(s.factors[row]); };
    if (!before.empty)
      product(s.q_start_t, at.count, before.values, cols, features(), [&](idx_t row, idx_t c, const packet<T>& sum) {
        fetch_rows<T>(prefetch, row, c);
        store<T>(to.at(row, c), at.own_keys ? sum : mul(sum, factor(row)));
      });
    bool begun = !before.empty;
    if constexpr (R == rule::low_rank) {
      triangle_product<triangle::up_to>(
          s.p_b_t, at.count, corrections(), cols, [&](idx_t row, idx_t c, const packet<T>& sum) {
            store<T>(to.at(row, c), begun ? add(load<T>(to.at(row, c)), sum) : sum);
          });
      begun = true;
    }
    if (at.own_keys)
      triangle_product<triangle::up_to>(s.p_t, at.count, values(), cols,
                                        [&](idx_t row, idx_t c, const packet<T>& sum) {
                                          T* const x = to.at(row, c);
                                          store<T>(x, mul(begun ? add(load<T>(x), sum) : sum, factor(row)));
                                        });
    for (idx_t t = at.first; t < at.count; ++t)
      for (idx_t c = 0; c < cols; c += panel_width<T>)
        out.write_part(to.at(t, c), at.origin + t, col + c, std::min<idx_t>(panel_width<T>, cols - c));
  }

  /// The state after the chunk, in `after`.
  [[gnu::noinline]] void update(idx_t count, recurrence_state<T>& state, const panels<T>& after,
                                row_prefetcher<>& prefetch) const {
    const panels<T> written = R == rule::low_rank ? corrections() : values();
    s.pass(count, written, col, cols, state.values, state.empty, after, prefetch);
    for (idx_t c = 0; state.weights && c < features(); c += width<T>) {
      packet<T> sum = zero<T>();
      for (idx_t t = 0; t < count; ++t) sum = add(sum, load<T>(s.k_end.at(t, c)));
      T* const z = state.weights + c;
      store<T>(z, s.decay.kind == decay_kind::none ? add(load<T>(z), sum)
                                                   : fma(load<T>(z), s.decay.start(count - 1, c), sum));
    }
    state.values = after;
    state.empty = false;
  }

 private:
  /// The factors of rows: scale over the denominator.
  void divide_factors(idx_t count, const recurrence_state<T>& before) const {
    const T scale = call.recurrence.scale;
    for (idx_t t = 0; t < count; t += width<T>) {
      packet<T> sum = load<T>(s.factors + t);
      for (idx_t r = 0; r < features(); ++r)
        sum = fma(load<T>(s.q_start_t.at(r, t)), broadcast<T>(before.weights[r]), sum);
      store<T>(s.factors + t, sum);
    }
    for (idx_t t = 0; t < count; ++t) {
      const T whole = scale * s.factors[t] + call.eps;
      s.factors[t] = std::abs(whole) < least_denominator<T> ? T(0) : scale / whole;
    }
  }
  /// The sum of the numbers of row t up to column t; those beyond are overwritten, because they may be NaN.
  static T sum_before(const panels<T>& p, idx_t t) {
    packet<T> sum = zero<T>();
    for (idx_t c = t + 1; c % width<T> != 0; ++c) *p.at(t, c) = T(0);
    for (idx_t c = 0; c <= t; c += width<T>) sum = add(sum, load<T>(p.at(t, c)));
    return sum_lanes(sum);
  }
};

}}}  // namespace attn::ATTN_ISA::detail
