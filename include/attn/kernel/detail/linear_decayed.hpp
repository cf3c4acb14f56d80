// attn: linear attention with decays per channel, a bonus, a scale, or states.
//
// With gamma the sum of the log decays in the chunk up to a token, and S and z the sums before the chunk:
//
//   P_ij = q_i.k_j e^(gamma_i - gamma_j), j <= i       out = q_start S + P v, q_start_i = q_i e^gamma_i
//   S    = e^gamma_last S + k_end^T v,                 k_end_j = k_j e^(gamma_last - gamma_j)
//   z, and the denominators, are the same with ones for v
//   bonus u: query i sees S_(i-1) and u k_i v_i^T: its decays end one token earlier, and the diagonal of P is u q_i k_i
//
// q is scale phi(q), k is phi(k). Decays are multiplied, never divided (delta_pairs.hpp). Separate from engine.hpp,
// because calls without decays do not need a second copy of their rows: with decays per channel a call takes 1.3 to 1.4
// times as long.
#pragma once

#include <attn/kernel/detail/decayed_keys.hpp>

namespace attn::inline ATTN_ISA::detail {

/// Scratch memory of one worker.
template <class T>
struct decayed_scratch : decayed_keys<T> {
  panels<T> state, q, q_start, q_t, q_start_t;  // [feature][column]; [token][feature]; transposed
  panels<T> out, p, p_t;                        // [token][column]; [token][token]
  T *z, *den;                                   // [feature]; [token]

  static decayed_scratch layout(arena& memory, const kernel_call<T>& call) {
    const idx_t m = call.map->features, columns = call.shape.dim_v, own = call.extra.bonus ? 1 : 0;
    constexpr idx_t chunk = kernel_chunk;
    decayed_scratch s;
    static_cast<decayed_keys<T>&>(s) = decayed_keys<T>::layout(memory, call, columns, call.map->scratch_size);
    const auto allocate = [&](idx_t rows, idx_t cols, std::initializer_list<panels<T>*> all) {
      for (panels<T>* x : all) *x = panels<T>::layout(memory, rows, cols);
    };
    allocate(m, columns, {&s.state});
    allocate(chunk + own, m, {&s.q});  // rows are also read beginning with the second
    s.q.capacity = chunk;
    allocate(m, chunk, {&s.q_t});
    allocate(m, chunk + own, {&s.q_start_t});
    s.q_start = s.q;
    if (call.decays() != decay_kind::none) allocate(chunk + own, m, {&s.q_start});
    allocate(chunk, columns, {&s.out});
    allocate(chunk + own, chunk, {&s.p});
    allocate(chunk, chunk + own, {&s.p_t});
    s.z = memory.allocate<T>(round_up(m, panel_width<T>));
    s.den = memory.allocate<T>(chunk);
    return s;
  }
};

template <class T>
struct decayed_engine {
  const kernel_call<T>& call;
  const linear_extra<T>& extra = call.extra;

  idx_t features() const { return call.map->features; }
  idx_t dim_v() const { return call.shape.dim_v; }
  /// Whether z is needed.
  bool weights() const { return call.normalise || extra.final_weights || call.state; }
  decay_kind kind() const { return call.decays(); }

  // States ------------------------------------------------------------------------------------------------------------

  void begin(idx_t b, idx_t h, const decayed_scratch<T>& s) const {
    std::fill_n(s.state.data, s.state.capacity * round_up(dim_v(), panels<T>::wide), T(0));
    std::fill_n(s.z, round_up(features(), panels<T>::wide), T(0));
    each_number(b, h, s, extra.initial_state, extra.initial_weights, [](T& own, const T& given) { own = given; });
  }
  void end(idx_t b, idx_t h, const decayed_scratch<T>& s) const {
    each_number(b, h, s, extra.final_state, extra.final_weights, [](const T& own, T& given) { given = own; });
  }
  bool starts_with_sums() const { return call.state || extra.initial_state || extra.initial_weights; }
  /// f(own, given) for every number of S and z, and that of the state or of the views, if given.
  template <class Values, class Weights, class F>
  void each_number(idx_t b, idx_t h, const decayed_scratch<T>& own, const Values& values, const Weights& weights,
                   F&& f) const {
    const kernel_sums<T> sums = call.state ? call.state_sums(b, h) : kernel_sums<T>();
    for (idx_t r = 0; r < features(); ++r) {
      if (call.state) {
        for (idx_t d = 0; d < dim_v(); ++d) f(*own.state.at(r, d), sums.value(r, d));
        f(own.z[r], sums.weights[r]);
        continue;
      }
      for (idx_t d = 0; values.data() && d < dim_v(); ++d) f(*own.state.at(r, d), values(b, at(values, h), r, d));
      if (weights.data() && this->weights()) f(own.z[r], weights(b, at(weights, h), r));
    }
  }
  template <class View>
  idx_t at(const View& x, idx_t h) const { return call.parameter_head(x.extent(1), h); }

  // Chunks ------------------------------------------------------------------------------------------------------------

  /// Advances the sums over the keys that were loaded.
  void advance(idx_t count, const decayed_scratch<T>& s, row_prefetcher<>& prefetch) const {
    pass_chunk(s.decay, s.k_end, s.v, dim_v(), count, s.state, &prefetch);
    for (idx_t col = 0; weights() && col < features(); col += width<T>) {
      packet<T> sum = zero<T>();
      for (idx_t t = 0; t < count; ++t) sum = add(sum, load<T>(s.k_end.at(t, col)));
      T* const to = s.z + col;
      store<T>(to, s.decay.kind == decay_kind::none ? add(load<T>(to), sum)
                                                    : fma(load<T>(to), s.decay.start(count - 1, col), sum));
    }
  }

  /// Rows origin + [first, count) of query head `head`, which read the sums and, with `pairs`, are at the positions of
  /// the keys that were loaded.
  void attend(idx_t b, idx_t head, idx_t origin, idx_t first, idx_t count, bool pairs,
              const decayed_scratch<T>& s) const {
    const idx_t m = features(), own = extra.bonus && pairs ? 1 : 0, rows = count - own;
    const stored_matrix<T> to = call.out.head(b, head);
    for (idx_t col = 0; col < m; col += panels<T>::wide) std::fill_n(s.q.panel(col), first * panels<T>::wide, T(0));
    call.map->rows(call.q.head(b, head), origin + first, count - first, s.q.from_row(first), s.map);
    if (extra.scale != T(1))
      each_packet(count, m, [&](idx_t, idx_t, const auto& x) { return mul(x, broadcast<T>(extra.scale)); }, s.q, s.q);
    const bool decayed = pairs && kind() != decay_kind::none;
    const panels<T> q = s.q.from_row(own);
    const panels<T>& q_start = decayed ? s.q_start : s.q;
    if (decayed) {
      for (idx_t col = 0; own && col < m; col += width<T>) store<T>(q_start.at(0, col), load<T>(s.q.at(0, col)));
      s.decay.from_start(q, rows, s.q_start.from_row(own));
    }
    transpose_panels(q_start, count, m, s.q_start_t);
    row_prefetcher<> prefetch;
    const idx_t next = origin + kernel_chunk, after = std::min(next + kernel_chunk, call.lengths.queries(b));
    call.fetch(prefetch, call.q.head(b, head), next, after);
    call.fetch(prefetch, to, next, after);
    product(s.q_start_t, count, s.state, dim_v(), m, [&](idx_t row, idx_t col, const packet<T>& sum) {
      fetch_rows<T>(prefetch, row, col);
      store<T>(s.out.at(row, col), sum);
    });
    if (call.normalise) read_weights(count, s);
    if (pairs) {
      if (s.decay.kind != decay_kind::channel) transpose_panels(q, rows, m, s.q_t);
      pair_products(s.decay, s.pairs, q, s.q_t, s.k, s.k_t, rows, triangle::up_to, s.p.from_row(own));
      for (idx_t t = 0; own && t < count; ++t) {
        T sum = T(0);
        for (idx_t r = 0; r < m; ++r) sum += extra.bonus(head, r) * *s.q.at(t, r) * *s.k.at(t, r);
        *s.p.at(t, t) = sum;
      }
      for (idx_t t = 0; t < count && call.normalise; ++t) s.den[t] += sum_before(s.p, t);
      transpose_panels(s.p, count, count, s.p_t);
      triangle_product<triangle::up_to>(s.p_t, count, s.v, dim_v(), add_to(s.out));
    }
    for (idx_t t = first; t < count; ++t) {
      if (call.normalise) {
        const T whole = s.den[t] + call.eps;
        const packet<T> n = broadcast<T>(std::abs(whole) < least_denominator<T> ? T(0) : T(1) / whole);
        for (idx_t col = 0; col < dim_v(); col += width<T>)
          store<T>(s.out.at(t, col), mul(load<T>(s.out.at(t, col)), n));
      }
      for (idx_t col = 0; col < dim_v(); col += panel_width<T>)
        to.access->write(s.out.at(t, col), to.row(origin + t) + col * to.col_stride * to.access->size,
                         std::min<idx_t>(panel_width<T>, dim_v() - col), to.col_stride);
    }
  }

  /// den = q_start z
  void read_weights(idx_t count, const decayed_scratch<T>& s) const {
    for (idx_t t = 0; t < count; t += width<T>) {
      packet<T> sum = zero<T>();
      for (idx_t r = 0; r < features(); ++r) sum = fma(load<T>(s.q_start_t.at(r, t)), broadcast<T>(s.z[r]), sum);
      store<T>(s.den + t, sum);
    }
  }
  /// The sum of the numbers of row t up to column t; those beyond are overwritten, because they may be NaN.
  static T sum_before(const panels<T>& p, idx_t t) {
    packet<T> sum = zero<T>();
    for (idx_t col = t + 1; col % width<T> != 0; ++col) *p.at(t, col) = T(0);
    for (idx_t col = 0; col <= t; col += width<T>) sum = add(sum, load<T>(p.at(t, col)));
    return sum_lanes(sum);
  }

  // Heads -------------------------------------------------------------------------------------------------------------

  void run_head(idx_t b, idx_t h, const decayed_scratch<T>& s) const {
    const idx_t keys = call.lengths.keys(b), queries = call.lengths.queries(b), offset = keys - queries;
    const idx_t group = call.group();
    const auto attend_rows = [&](idx_t first, idx_t last) {
      for (idx_t i = first; i < last; i += kernel_chunk)
        for (idx_t g = 0; g < group; ++g)
          attend(b, h * group + g, i, 0, std::min<idx_t>(kernel_chunk, last - i), false, s);
    };
    begin(b, h, s);
    const idx_t alone = call.causal ? std::min(queries, -offset) : keys == 0 ? queries : 0;  // see no key
    if (starts_with_sums()) attend_rows(0, alone);
    for (idx_t g = h * group; alone > 0 && !starts_with_sums() && g < (h + 1) * group; ++g)
      call.out.head(b, g).clear_rows(0, alone);
    for (idx_t c = 0; c < keys; c += kernel_chunk) {
      const idx_t count = std::min<idx_t>(kernel_chunk, keys - c), first = std::max<idx_t>(offset - c, 0);
      s.load(call, b, h, c, count);
      row_prefetcher<> prefetch = call.prefetch_keys(b, h, c + count);
      if (kind() == decay_kind::channel)
        prefetch.add(head_of(extra.log_decay, b, at(extra.log_decay, h)), c + count,
                     std::min<idx_t>(c + 2 * kernel_chunk, keys));
      if (call.causal && first < count) {
        if (s.decay.kind != decay_kind::channel) transpose_panels(s.k, count, features(), s.k_t);
        for (idx_t g = 0; g < group; ++g) attend(b, h * group + g, c - offset, first, count, true, s);
      }
      advance(count, s, prefetch);
    }
    if (!call.causal && keys > 0) attend_rows(0, queries);
    end(b, h, s);
    for (idx_t g = h * group; g < (h + 1) * group && !call.state; ++g)
      call.out.head(b, g).clear_rows(queries, call.shape.queries);
    if (call.state) call.decay_at(call.state.at(b), h) *= whole_decay(b, h, keys);
  }

  /// The product of the decays of all tokens; NaN where decays are per channel.
  T whole_decay(idx_t b, idx_t h, idx_t keys) const {
    if (kind() == decay_kind::none) return T(1);
    if (kind() == decay_kind::channel) return std::numeric_limits<T>::quiet_NaN();
    T whole = T(1);
    for (idx_t t = 0; t < keys; ++t) whole *= call.gate_at(b, h, t);
    return whole;
  }

  void run(execution& exec) const {
    auto work = call.work();
    work.operations *= 1.5;
    const auto limit = exec.limit_threads(work);
    const idx_t item_heads = call.shape.batch * call.heads;
    exec.shared_scratch([&](arena& memory) {
      call.map->layout(memory, item_heads);
      return 0;
    });
    call.map->prepare(exec);
    exec.for_each(item_heads, [&](idx_t item_head, int worker) {
      const auto s = exec.scratch(worker, [&](arena& memory) { return decayed_scratch<T>::layout(memory, call); });
      run_head(item_head / call.heads, item_head % call.heads, s);
    });
  }
  static void run_call(const kernel_call<T>& call, execution& exec) { decayed_engine{call}.run(exec); }
};

}  // namespace attn::inline ATTN_ISA::detail
