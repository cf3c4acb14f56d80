// attn: the backward pass of the layer norms of long_short.
#pragma once

#include <attn/low_rank/detail/long_short_call.hpp>

namespace attn::inline ATTN_ISA::detail {

/// Gradients of gamma and beta, dim numbers each, one after the other.
template <class T>
struct norm_sums {
  T* gamma = nullptr;
  index dim = 0;

  T* beta() const { return gamma + dim; }
  static index size(index dim) { return 2 * dim; }
  void clear() const { std::fill_n(gamma, size(dim), T(0)); }
  void add(const norm_sums& other) const {
    for (index d = 0; d < size(dim); ++d) gamma[d] += other.gamma[d];
  }
};

/// From dy, the gradient of the norm of x: the gradient of x, which overwrites it, and those of gamma and beta, which
/// are added to `sums`.
template <class T>
[[gnu::noinline]] void norm_back(const key_norm<T>& norm, const T* x, index dim, T* dy, const norm_sums<T>& sums) {
  const T share = T(1) / static_cast<T>(dim);
  T sum = 0, squares = 0, by = 0, by_x = 0;
  for (index d = 0; d < dim; ++d) sum += x[d];
  const T mean = sum * share;
  for (index d = 0; d < dim; ++d) squares += (x[d] - mean) * (x[d] - mean);
  const T factor = T(1) / std::sqrt(squares * share + norm.eps);
  for (index d = 0; d < dim; ++d) {
    const T normed = (x[d] - mean) * factor;
    sums.gamma[d] += dy[d] * normed;
    sums.beta()[d] += dy[d];
    dy[d] *= norm.gamma[d];
    by += dy[d];
    by_x += dy[d] * normed;
  }
  by *= share, by_x *= share;
  for (index d = 0; d < dim; ++d) dy[d] = factor * (dy[d] - by - (x[d] - mean) * factor * by_x);
}

}  // namespace attn::inline ATTN_ISA::detail
