// attn: the random features of rfa.
#pragma once

#include <attn/kernel/detail/projection.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <class T>
struct rfa_features final : projected_features<T> {
  using projected_features<T>::call, projected_features<T>::rows, projected_features<T>::dim;

  const T norm_eps;

  explicit rfa_features(const kernel_call<T>& c) : projected_features<T>(c, 2), norm_eps(c.norm_eps) {}

  void prepare(execution&) override { this->pack(T(1)); }

  void keys(const token_rows<T>& x, idx_t item_head, T* phi, T*, T* work) const override {
    T *const columns = work, *const factor = work + dim * kernel_chunk;
    T powers[kernel_chunk];
    call.k.access->pack_columns(x, dim, columns);
    normalise(columns, x.lanes, factor, factor, powers);
    this->project(item_head, columns, x.lanes, phi, this->pairs_in(work));
    sines_of(phi, rows, x.lanes, factor);
  }

  /// norm = |x| and factor = 1 / (|x| + norm_eps) of columns x, which may be one list. Columns whose squares overflow
  /// are multiplied by powers[t] first, and norm_eps too.
  void normalise(T* columns, idx_t lanes, T* norm, T* factor, T* powers) const {
    sum_squares(columns, dim, lanes, norm);
    std::fill_n(powers, lanes, T(1));
    if (has_long_tokens(norm, lanes)) [[unlikely]]
      if (shorten_tokens(columns, dim, lanes, norm, 0, powers)) sum_squares(columns, dim, lanes, norm);
    for (idx_t t = 0; t < lanes; ++t) {
      norm[t] = std::sqrt(norm[t]);
      const T whole = norm[t] + norm_eps * powers[t];
      factor[t] = whole == T(0) ? T(0) : T(1) / whole;
    }
  }
};

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN_IN(T) struct rfa_features<T>
#include <attn/core/detail/compiled.hpp>
