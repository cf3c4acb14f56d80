// attn: the backward pass of the random features of rfa.
#pragma once

#include <attn/kernel/detail/projection_backward.hpp>
#include <attn/kernel/detail/rfa_features.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <class T>
struct rfa_features_backward final : projected_features_backward<T> {
  using base = projected_features_backward<T>;
  using base::rows, base::dim;

  const rfa_features<T>& made;

  explicit rfa_features_backward(const rfa_features<T>& f) : base(f), made(f) {
    this->scratch_size += 2 * kernel_chunk;
  }

  void prepare(execution&) override { this->pack(T(1)); }

  void back(const tokens_back<T>& x, T* dx, kernel_sums<T>* dw, T* work) const override {
    const idx_t lanes = x.rows.lanes, m = rows * kernel_chunk;
    T *const columns = work, *const norm = work + (dim + 1) * kernel_chunk, *const factor = norm + kernel_chunk;
    this->features.call.k.access->pack_columns(x.rows, dim, columns);
    T powers[kernel_chunk];
    made.normalise(columns, lanes, norm, factor, powers);
    for (idx_t r = 0; r < rows; ++r)
      for (idx_t t = 0; t < lanes; t += width<T>) {
        const idx_t n = r * kernel_chunk + t;
        const packet<T> of_sine = mul(load<T>(x.d + n), load<T>(x.phi + n + m));
        store<T>(x.d + n, sub(of_sine, mul(load<T>(x.d + n + m), load<T>(x.phi + n))));
      }
    if (dx) {
      this->project_back(x.item_head, x.d, lanes, dx);
      back_norm(columns, norm, factor, powers, lanes, dx);
    }
    if (dw) this->add_features(x, x.d, columns, factor, factor + kernel_chunk, *dw);
  }

  /// From the gradients y of x^ to those of x = x^ (|x| + norm_eps). Columns are x times powers[t].
  void back_norm(const T* columns, const T* norm, const T* factor, const T* powers, idx_t lanes, T* dx) const {
    for (idx_t t = 0; t < lanes; t += width<T>) {
      const packet<T> f = load<T>(factor + t), size = load<T>(norm + t), power = load<T>(powers + t);
      const packet<T> of_x = mul(f, power);
      packet<T> along = zero<T>();
      for (idx_t d = 0; d < dim; ++d)
        along = fma(load<T>(dx + d * kernel_chunk + t), mul(load<T>(columns + d * kernel_chunk + t), f), along);
      const packet<T> less = mul(if_less(zero<T>(), size, div(mul(along, f), size), zero<T>()), power);
      for (idx_t d = 0; d < dim; ++d) {
        const idx_t n = d * kernel_chunk + t;
        store<T>(dx + n, sub(mul(load<T>(dx + n), of_x), mul(load<T>(columns + n), less)));
      }
    }
  }
};

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN_IN(T) struct rfa_features_backward<T>
#include <attn/core/detail/compiled.hpp>
