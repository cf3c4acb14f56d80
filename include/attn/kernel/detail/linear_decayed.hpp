// attn: linear attention with decays per channel, a bonus, a scale, or states.
//
// With gamma the sum of the log decays in the chunk up to a token and S the sums before the chunk; where denominators
// are wanted, values have a further column of ones, and so S has z:
//
//   P_ij = q_i.k_j e^(gamma_i - gamma_j), j <= i       out = q_start S + P v, q_start_i = q_i e^gamma_i
//   S    = e^gamma_last S + k_end^T v,                 k_end_j = k_j e^(gamma_last - gamma_j)
//   bonus u: query i sees S_(i-1) and u k_i v_i^T: its decays end one token earlier, and the diagonal of P is u q_i k_i
//
// q is scale phi(q), k is phi(k). Decays are multiplied, never divided (delta_pairs.hpp). Apart from engine.hpp, because
// what has no decays needs no second copy of its rows: this one takes about one and a half times as long.
#pragma once

#include <attn/kernel/detail/delta_pairs.hpp>
#include <attn/kernel/detail/engine.hpp>

namespace attn::inline ATTN_ISA::detail {

/// Scratch memory of one worker.
template <class T>
struct decayed_scratch {
  panels<T> state, q, k, q_start, k_end;     // [feature][column]; [token][feature]
  panels<T> q_t, k_t, q_start_t;
  panels<T> v, out, p, p_t;                  // [token][column]; [token][token]
  delta_decay<T> decay;
  delta_pair_scratch<T> pairs;
  T *phi, *shift, *map;

  static decayed_scratch layout(arena& memory, const kernel_call<T>& call, index columns) {
    decayed_scratch s;
    constexpr index chunk = kernel_chunk;
    const decay_kind kind = call.decays();
    const index m = call.map->features, own = call.extra.bonus ? 1 : 0;
    const auto allocate = [&](index rows, index cols, std::initializer_list<panels<T>*> all) {
      for (panels<T>* x : all) *x = panels<T>::layout(memory, rows, cols);
    };
    allocate(m, columns, {&s.state});
    allocate(chunk + own, m, {&s.q});
    allocate(chunk, m, {&s.k});
    allocate(m, chunk, {&s.q_t, &s.k_t});
    allocate(m, chunk + own, {&s.q_start_t});
    s.q_start = s.q, s.k_end = s.k;
    if (kind != decay_kind::none) {
      allocate(chunk + own, m, {&s.q_start});
      allocate(chunk, m, {&s.k_end});
    }
    allocate(chunk, columns, {&s.v, &s.out});
    allocate(chunk + own, chunk, {&s.p});
    allocate(chunk, chunk + own, {&s.p_t});
    s.decay = delta_decay<T>::layout(memory, m, kind);
    s.pairs = delta_pair_scratch<T>::layout(memory, m, kind);
    s.phi = memory.allocate<T>(round_up(m, panel_width<T>) * chunk);
    s.shift = memory.allocate<T>(chunk);
    s.map = memory.allocate<T>(call.map->scratch_size);
    return s;
  }
};

template <class T>
struct decayed_engine {
  const kernel_call<T>& call;
  const linear_extra<T>& extra = call.extra;

  index features() const { return call.map->features; }
  index dim_v() const { return call.shape.dim_v; }
  /// Is there a column of ones?
  bool weights() const { return call.normalise || extra.final_weights || call.state; }
  index columns() const { return dim_v() + (weights() ? 1 : 0); }
  decay_kind kind() const { return call.decays(); }
  static panels<T> from_row(const panels<T>& x, index row) { return {x.data + row * panels<T>::wide, x.capacity}; }

  // States ------------------------------------------------------------------------------------------------------------

  void begin(index b, index h, const panels<T>& to) const {
    std::fill_n(to.data, to.capacity * round_up(columns(), panels<T>::wide), T(0));
    each_number(b, h, to, extra.initial_state, extra.initial_weights, [](T& own, const T& given) { own = given; });
  }
  void end(index b, index h, const panels<T>& from) const {
    each_number(b, h, from, extra.final_state, extra.final_weights, [](const T& own, T& given) { given = own; });
  }
  bool starts_with_sums() const { return call.state || extra.initial_state || extra.initial_weights; }
  /// f(own, given) for every number of S and z, and that of the state or of the views, if given.
  template <class Values, class Weights, class F>
  void each_number(index b, index h, const panels<T>& own, const Values& values, const Weights& weights, F&& f) const {
    const kernel_sums<T> sums = call.state ? call.state_sums(b, h) : kernel_sums<T>();
    for (index r = 0; r < features(); ++r) {
      if (call.state) {
        for (index d = 0; d < dim_v(); ++d) f(*own.at(r, d), sums.value(r, d));
        f(*own.at(r, dim_v()), sums.weights[r]);
        continue;
      }
      for (index d = 0; values.data() && d < dim_v(); ++d) f(*own.at(r, d), values(b, at(values, h), r, d));
      if (weights.data() && this->weights()) f(*own.at(r, dim_v()), weights(b, at(weights, h), r));
    }
  }
  template <class View>
  index at(const View& x, index h) const {
    return x.extent(1) == call.heads ? h : h / (call.heads / x.extent(1));
  }

  // Chunks ------------------------------------------------------------------------------------------------------------

  /// Features of rows, from columns; what is beyond the last one is 0.
  void rows_of(T* columns, index count, T factor, const panels<T>& to) const {
    const index m = features(), padded = round_up(m, width<T>);
    std::fill_n(columns + m * kernel_chunk, (padded - m) * kernel_chunk, T(0));
    for (index f = 0; f < padded; f += width<T>)
      for (index t = 0; t < count; t += width<T>) {
        packet<T> square[width<T>];
        for (int i = 0; i < width<T>; ++i)
          square[i] = mul(load<T>(columns + (f + i) * kernel_chunk + t), broadcast<T>(factor));
        transpose<T>(square);
        for (int i = 0; i < width<T>; ++i) store<T>(to.at(t + i, f), square[i]);
      }
  }

  void load_keys(index b, index h, index begin, index count, const decayed_scratch<T>& s) const {
    const index kv_head = call.kv_head(h);
    call.map->keys(call.k.head(b, kv_head).block(begin, count), b * call.heads + h, s.phi, s.shift, s.map);
    rows_of(s.phi, count, T(1), s.k);
    const stored_matrix<T> values = call.v.head(b, kv_head);
    values.access->pack_panels(values, begin, count, s.v.data);
    for (index t = 0; weights() && t < count; ++t) *s.v.at(t, dim_v()) = T(1);
    if (kind() == decay_kind::none) return;
    if (extra.log_decay.data()) {
      s.decay.load(extra.log_decay, b, at(extra.log_decay, h), begin, count);
    } else {
      for (index t = 0; t < count; ++t) s.decay.gates[t] = call.gate_at(b, h, begin + t);
      gate_factors(s.decay.gates, count, false, s.decay.pair, s.decay.since_start);
    }
    s.decay.to_end(s.k, count, s.k_end);
  }

  /// The sums after the keys that were loaded.
  void advance(index count, const decayed_scratch<T>& s) const {
    product(s.k_end, features(), s.v, columns(), count, [&](index row, index col, const packet<T>& sum) {
      if (row >= features()) return;
      T* const to = s.state.at(row, col);
      store<T>(to, fma(load<T>(to), broadcast<T>(s.decay.whole(row, count)), sum));
    });
  }

  /// Rows origin + [first, count) of query head `head`: after the sums, and with `pairs` at the positions of the keys that
  /// were loaded.
  void attend(index b, index h, index head, index origin, index first, index count, bool pairs,
              const decayed_scratch<T>& s) const {
    const index m = features(), own = extra.bonus && pairs ? 1 : 0, rows = count - own;
    const stored_matrix<T> to = call.out.head(b, head);
    call.map->queries(call.q.head(b, head).block(origin, count, first), b * call.heads + h, s.phi, s.shift, s.map);
    rows_of(s.phi, count, extra.scale, s.q);
    const bool decayed = pairs && kind() != decay_kind::none;
    const panels<T> q = from_row(s.q, own);
    const panels<T>& q_start = decayed ? s.q_start : s.q;
    if (decayed) {
      for (index col = 0; own && col < m; col += width<T>) store<T>(q_start.at(0, col), load<T>(s.q.at(0, col)));
      s.decay.from_start(q, rows, from_row(s.q_start, own));
    }
    transpose_panels(q_start, count, m, s.q_start_t);
    product(s.q_start_t, count, s.state, columns(), m,
            [&](index row, index col, const packet<T>& sum) { store<T>(s.out.at(row, col), sum); });
    if (pairs) {
      if (s.decay.kind != decay_kind::channel) transpose_panels(q, rows, m, s.q_t);
      pair_products(s.decay, s.pairs, q, s.q_t, s.k, s.k_t, rows, triangle::up_to, from_row(s.p, own));
      for (index t = 0; own && t < count; ++t) {
        T sum = T(0);
        for (index r = 0; r < m; ++r) sum += extra.bonus(head, r) * *s.q.at(t, r) * *s.k.at(t, r);
        *s.p.at(t, t) = sum;
      }
      transpose_panels(s.p, count, count, s.p_t);
      triangle_product<triangle::up_to>(s.p_t, count, s.v, columns(), [&](index row, index col, const packet<T>& sum) {
        store<T>(s.out.at(row, col), add(load<T>(s.out.at(row, col)), sum));
      });
    }
    for (index t = first; t < count; ++t) {
      if (call.normalise) {
        const T whole = *s.out.at(t, dim_v()) + call.eps;
        const packet<T> n = broadcast<T>(std::abs(whole) < least_denominator<T> ? T(0) : T(1) / whole);
        for (index col = 0; col < dim_v(); col += width<T>) store<T>(s.out.at(t, col), mul(load<T>(s.out.at(t, col)), n));
      }
      for (index col = 0; col < dim_v(); col += panel_width<T>)
        to.access->write(s.out.at(t, col), to.row(origin + t) + col * to.col_stride * to.access->size,
                         std::min<index>(panel_width<T>, dim_v() - col), to.col_stride);
    }
  }

  // Heads -------------------------------------------------------------------------------------------------------------

  void run_head(index b, index h, const decayed_scratch<T>& s) const {
    const index keys = call.lengths.keys(b), queries = call.lengths.queries(b), offset = keys - queries;
    const index group = call.group();
    const auto attend_rows = [&](index first, index last) {
      for (index i = first; i < last; i += kernel_chunk)
        for (index g = 0; g < group; ++g)
          attend(b, h, h * group + g, i, 0, std::min<index>(kernel_chunk, last - i), false, s);
    };
    begin(b, h, s.state);
    const index alone = call.causal ? std::min(queries, -offset) : keys == 0 ? queries : 0;  // see no key
    if (starts_with_sums()) attend_rows(0, alone);
    for (index g = h * group; alone > 0 && !starts_with_sums() && g < (h + 1) * group; ++g)
      call.out.head(b, g).clear_rows(0, alone);
    for (index c = 0; c < keys; c += kernel_chunk) {
      const index count = std::min<index>(kernel_chunk, keys - c), first = std::max<index>(offset - c, 0);
      load_keys(b, h, c, count, s);
      if (call.causal && first < count) {
        if (s.decay.kind != decay_kind::channel) transpose_panels(s.k, count, features(), s.k_t);
        for (index g = 0; g < group; ++g) attend(b, h, h * group + g, c - offset, first, count, true, s);
      }
      advance(count, s);
    }
    if (!call.causal && keys > 0) attend_rows(0, queries);
    end(b, h, s.state);
    for (index g = h * group; g < (h + 1) * group && !call.state; ++g)
      call.out.head(b, g).clear_rows(queries, call.shape.queries);
    if (call.state) call.state.decay[b * call.heads + h] *= whole_decay(b, h, keys);
  }

  /// Of all tokens; not a number where it is not one number.
  T whole_decay(index b, index h, index keys) const {
    if (kind() == decay_kind::none) return T(1);
    if (kind() == decay_kind::channel) return std::numeric_limits<T>::quiet_NaN();
    T whole = T(1);
    for (index t = 0; t < keys; ++t) whole *= call.gate_at(b, h, t);
    return whole;
  }

  void run(execution& exec) const {
    auto work = call.work();
    work.operations *= 1.5;
    const auto limit = exec.limit_threads(work);
    const index pairs = call.shape.batch * call.heads;
    exec.shared_scratch([&](arena& memory) {
      call.map->layout(memory, pairs);
      return 0;
    });
    call.map->prepare(exec);
    exec.for_each(pairs, [&](index pair, int worker) {
      const auto s = exec.scratch(
          worker, [&](arena& memory) { return decayed_scratch<T>::layout(memory, call, columns()); });
      run_head(pair / call.heads, pair % call.heads, s);
    });
  }
  static void run_call(const kernel_call<T>& call, execution& exec) { decayed_engine{call}.run(exec); }
};

}  // namespace attn::inline ATTN_ISA::detail
