// attn: the gradient of the state alone, back through a chunk, by the rules that read the state.
//
// Where threads share a head, this is what goes from chunk to chunk; everything else of a chunk follows from the state
// before it and the gradient of that after it. Some value columns at a time may be passed, with the same bits as in
// back().
#pragma once

#include <attn/kernel/detail/recurrence_backward.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <rule R, class T>
struct recurrence_pass_back : recurrence_backward_kernel<R, T> {
  using base = recurrence_backward_kernel<R, T>;
  using base::columns, base::decays, base::features, base::h, base::low_rank, base::s;

  /// X, or by the rule of low rank X_W.
  const panels<T>& x() const { return low_rank ? s.y : s.x; }

  /// Queries and d_out; the terms of X and R0 that need nothing else of the chunk; and the rows with which it writes.
  void load_queries(idx_t begin, idx_t count, const panels<T>& d_state) const {
    const recurrence_block at{h, begin, 0, count, true};
    base::load_queries(at);
    if (decays()) s.decay.from_start(s.q, count, s.q_start);
    this->load_scores(at, count, s.q);
    triangle_product<triangle::from>(low_rank ? s.p_b : s.p, count, s.d_out, columns(), write_to(x()));
    if (low_rank) triangle_product<triangle::from>(s.p, count, s.d_out, columns(), write_to(s.x));
    product(decays() ? s.q_start : s.q, features(), s.d_out, columns(), count, write_to(d_state));
    if (decays()) (void)this->writes_end_t(count);
  }

  /// R0 by R1, of the first `cols` columns; the terms of X become X.
  [[gnu::noinline]] void pass(idx_t count, const panels<T>& of_queries, const panels<T>& later, const panels<T>& to,
                              idx_t cols) const {
    product(low_rank && !decays() ? s.writes_t : s.k_end_t, count, later, cols, features(), add_to(x()));
    this->solve_back(count, cols);
    product(s.start, features(), s.y, cols, count, [&](idx_t row, idx_t col, const packet<T>& sum) {
      const packet<T> x = fma(load<T>(later.at(row, col)), broadcast<T>(s.decay.whole(row, count)),
                              load<T>(of_queries.at(row, col)));
      store<T>(to.at(row, col), low_rank ? add(x, sum) : sub(x, sum));
    });
  }
};

}}}  // namespace attn::ATTN_ISA::detail
