// attn: the queries of a chunk in the backward pass of a recurrence: their rows, scores and denominators.
#pragma once

#include <attn/kernel/detail/recurrence_gradient_store.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Of one head of the states.
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
