// attn: a chunk in the backward pass of a recurrence: scratch memory, queries, and how gradients are stored.
#pragma once

#include <attn/kernel/detail/kernel_backward_call.hpp>
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

  static recurrence_backward_scratch layout(const chunk_memory& from, const kernel_backward_call<T>& in) {
    const kernel_call<T>& call = in.forward;
    const idx_t m = in.features(), columns = in.columns(), dim = call.shape.dim, chunk = kernel_chunk;
    const idx_t own = call.recurrence.bonus ? 1 : 0;
    const bool decays = call.decays() != decay_kind::none;
    arena &memory = from.own, &kept = from.of(kept_for::pass_back);
    recurrence_backward_scratch s;
    idx_t map_scratch = 0;
    if constexpr (R == rule::add) map_scratch = (std::max)(call.map->scratch_size, in.map->scratch_size);
    static_cast<recurrence_keys<R, T>&>(s) = recurrence_keys<R, T>::layout(from, call, columns, map_scratch);
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

/// How the gradients of one chunk are stored, of one head of the states.
template <rule R, class T>
struct recurrence_gradient_store {
  const kernel_backward_call<T>& in;
  const recurrence_backward_scratch<R, T>& s;
  idx_t b, h;
  const kernel_call<T>& call = in.forward;
  const recurrence_parameters<T>& parameters = in.parameters();

  idx_t features() const { return in.features(); }
  idx_t dim_v() const { return in.dim_v(); }
  idx_t columns() const { return in.columns(); }

  void store_rows(const panels<T>& x, const stored_gradient_head<T>& to, idx_t begin, idx_t count) const {
    const idx_t cols = to.cols;
    for (idx_t t = 0; t < count; ++t)
      for (idx_t col = 0; col < cols; col += panel_width<T>)
        std::copy_n(x.at(t, col), std::min<idx_t>(panel_width<T>, cols - col), s.rows + t * cols + col);
    to.store_rows(s.rows, cols, begin, count);
  }
  /// The same through the norm of the rows x, where these are of unit norm.
  void store_unit_rows(const panels<T>& d, const panels<T>& x, const T* norm, const stored_gradient_head<T>& to,
                       idx_t begin, idx_t count) const {
    for (idx_t t = 0; parameters.unit_norm_eps >= T(0) && t < count; ++t) {
      const packet<T> along = broadcast<T>(-dot_rows(d, x, t, features())), factor = broadcast<T>(norm[t]);
      for (idx_t col = 0; col < features(); col += width<T>)
        store<T>(d.at(t, col), mul(factor, fma(along, load<T>(x.at(t, col)), load<T>(d.at(t, col)))));
    }
    store_rows(d, to, begin, count);
  }
  /// The same through the map, which takes features by columns.
  void store_features(const panels<T>& phi, const panels<T>& d, const token_rows<T>& rows, bool keys, idx_t first,
                      idx_t position, const stored_gradient_head<T>& to) const {
    for (const auto& [from, columns] : {std::pair{&phi, s.phi}, std::pair{&d, s.d_phi}})
      for (idx_t f = 0; f < features(); f += width<T>)
        for (idx_t t = 0; t < rows.count; t += width<T>) {
          packet<T> square[width<T>];
          for (int i = 0; i < width<T>; ++i) square[i] = load<T>(from->at(t + i, f));
          transpose<T>(square);
          for (int i = 0; i < width<T>; ++i) store<T>(columns + (f + i) * kernel_chunk + t, square[i]);
        }
    in.map->back_to({rows, b * call.heads + h, keys, first, position, s.phi, s.d_phi}, to, s.dx, nullptr, s.map);
  }

  /// The sums of a chunk run from its last token to its first; the gradient of a log decay of -infinity is 0.
  void store_decays(idx_t begin, idx_t count) const {
    const idx_t m = features(), head = in.at(in.d_log_decay, h);
    const bool channel = s.decay.kind == decay_kind::channel, adds = in.adds(in.d_log_decay, h);
    const matrix_view<T> to = head_of(in.d_log_decay, b, head);
    if constexpr (!reads_state<R>)
      each_packet(
          count, m,
          [](idx_t, idx_t, const auto& sum, const auto& k, const auto& dk) { return sub(sum, mul(k, dk)); }, s.d_gamma,
          s.d_gamma, s.k, s.dk);
    for (idx_t t = count - 1; t >= 0; --t) {
      for (idx_t r = 0; r < m; r += width<T>)
        store<T>(s.d_last + r, add(load<T>(s.d_last + r), load<T>(s.d_gamma.at(t, r))));
      for (idx_t col = 0; channel && col < m; col += panel_width<T>) {
        const T* const gates = s.decay.gate.at(t, col);
        for (idx_t r = 0; r < std::min<idx_t>(panel_width<T>, m - col); ++r)
          s.rows[col + r] = gates[r] > T(0) ? s.d_last[col + r] : T(0);
      }
      if (!channel) s.rows[0] = s.decay.gates[t] > T(0) ? sum_of(s.d_last, m) : T(0);
      store_gradient_row(s.rows, T(1), to, begin + t, adds);
    }
  }

 private:
  static T sum_of(const T* x, idx_t count) {
    const idx_t whole = count / width<T> * width<T>;
    packet<T> sums = zero<T>();
    for (idx_t n = 0; n < whole; n += width<T>) sums = add(sums, load<T>(x + n));
    T sum = sum_lanes(sums);
    for (idx_t n = whole; n < count; ++n) sum += x[n];
    return sum;
  }
};

/// The queries of a chunk: their rows, scores and denominators.
template <rule R, class T>
struct recurrence_backward_queries : recurrence_gradient_store<R, T> {
  using base = recurrence_gradient_store<R, T>;
  using base::b, base::call, base::columns, base::dim_v, base::features, base::in, base::parameters, base::s;

  bool decays() const { return s.decay.kind != decay_kind::none; }
  void clear(const panels<T>& x, idx_t rows, idx_t cols) const {
    for (idx_t col = 0; col < cols; col += panels<T>::wide) std::fill_n(x.panel(col), rows * panels<T>::wide, T(0));
  }

  /// Rows of q and d_out.
  [[gnu::noinline]] void load_queries(const recurrence_block& at) const {
    clear(s.q, at.first, features());
    load_rows<R>(call, call.q.head(b, call.query_head(at.head)), at.origin + at.first, at.count - at.first,
                 s.q.from_row(at.first), s.map, s.q_norm);
    if (parameters.bonus)
      for (idx_t r = 0; r < round_up(features(), width<T>); ++r)
        s.bonus[r] = r < features() ? parameters.bonus(at.head, r) : T(0);
    const stored_matrix<T> d = in.d_out.head(b, at.head);
    d.access->pack_panels(d, at.origin + at.first, at.count - at.first, s.d_out.data + at.first * panels<T>::wide);
    clear(s.d_out, at.first, columns());
    for (idx_t t = 0; t < at.count && in.weights(); ++t) *s.d_out.at(t, dim_v()) = T(0);
    if (const T scale = parameters.scale; !call.normalise && scale != T(1))
      each_packet(
          at.count, columns(), [&](idx_t, idx_t, const auto& x) { return mul(x, broadcast<T>(scale)); }, s.d_out,
          s.d_out);
  }

  /// P, with the bonus on its diagonal.
  [[gnu::noinline]] void load_scores(const recurrence_block& at, idx_t rows, const panels<T>& q) const {
    if (s.decay.kind != decay_kind::channel) transpose_panels(q, rows, features(), s.q_t);
    chunk_scores(s.decay, s.scores, q, s.q_t, s.k, s.k_t, rows, triangle::up_to, s.p.from_row(at.count - rows));
    if constexpr (R == rule::low_rank)
      chunk_scores(s.decay, s.scores, q, s.q_t, s.writes, s.writes_t, rows, triangle::up_to, s.p_b);
    for (idx_t t = 0; t < at.count && parameters.bonus; ++t) {
      packet<T> sums = zero<T>();
      for (idx_t r = 0; r < features(); r += width<T>)
        sums = fma(mul(load<T>(s.bonus + r), load<T>(s.q.at(t, r))), load<T>(s.k.at(t, r)), sums);
      const T sum = sum_lanes(sums);
      *s.p.at(t, t) = sum;
    }
  }

  /// d_out becomes the gradient of the numerator and the denominator.
  void normalise(const recurrence_block& at, const panels<T>& q_start, const panels<T>& state) const {
    transpose_panels(q_start, at.count, features(), s.q_start_t);
    product(s.q_start_t, at.count, state, columns(), features(), write_to(s.out));
    if (at.own_keys) {
      transpose_panels(s.p, at.count, at.count, s.p_t);
      triangle_product<triangle::up_to>(s.p_t, at.count, s.v, columns(), add_to(s.out));
    }
    const T scale = parameters.scale;
    for (idx_t t = at.first; t < at.count; ++t) {
      const T whole = scale * *s.out.at(t, dim_v()) + call.eps;
      const T n = std::abs(whole) < least_denominator<T> ? T(0) : scale / whole;
      const T d = n == T(0) ? T(0) : -n * (n * dot_rows(s.out, s.d_out, t, dim_v()));  // n^2 could overflow
      for (idx_t col = 0; col < dim_v(); col += width<T>)
        store<T>(s.d_out.at(t, col), mul(load<T>(s.d_out.at(t, col)), broadcast<T>(n)));
      *s.d_out.at(t, dim_v()) = d;
    }
  }

  /// dP times the scores without decays.
  void add_gate_scores(idx_t rows, const panels<T>& q, const panels<T>& dp) const {
    transpose_panels(q, rows, features(), s.q_t);
    score_product(s.q_t, s.k_t, rows, features(), [&](idx_t i, idx_t j, const packet<T>& sum) {
      T* const to = s.gate_scores + i * kernel_chunk + j;
      if (i < rows && j <= i) store<T>(to, fma(sum, load<T>(dp.at(i, j)), load<T>(to)));
    });
  }
};

}}}  // namespace attn::ATTN_ISA::detail
