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

  /// The terms of X and R0 that need nothing but the queries of the chunk.
  void load_queries(idx_t begin, idx_t count, const panels<T>& d_state) const {
    const recurrence_block at{h, begin, 0, count, true};
    base::load_queries(at);
    if (decays()) s.decay.from_start(s.q, count, s.q_start);
    this->load_scores(at, count, s.q);
    triangle_product<triangle::from>(low_rank ? s.p_b : s.p, count, s.d_out, columns(), write_to(x()));
    product(decays() ? s.q_start : s.q, features(), s.d_out, columns(), count, write_to(d_state));
  }

  /// The first `cols` columns of R1 become those of R0, and the terms of X become X.
  void pass(idx_t count, const panels<T>& of_queries, const panels<T>& d_state, idx_t cols) const {
    this->writes_from_later(count, d_state, cols, add_to(x()));
    each_packet(
        features(), cols,
        [&](idx_t r, idx_t, const auto& later, const auto& sum) {
          return fma(later, broadcast<T>(s.decay.whole(r, count)), sum);
        },
        d_state, d_state, of_queries);
    this->read_back(count, d_state, cols);
  }
};

}}}  // namespace attn::ATTN_ISA::detail
