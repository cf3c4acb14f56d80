// attn: the backward pass of the layer norms of long_short.
#pragma once

#include <attn/low_rank/detail/long_short_call.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Gradients of gamma and beta, dim numbers each, one after the other.
template <class T>
struct norm_sums {
  T* gamma = nullptr;
  idx_t dim = 0;

  T* beta() const { return gamma + dim; }
  static idx_t size(idx_t dim) { return 2 * dim; }
  void clear() const { std::fill_n(gamma, size(dim), T(0)); }
  void add(const norm_sums& other) const {
    for (idx_t d = 0; d < size(dim); ++d) gamma[d] += other.gamma[d];
  }
};

/// From dy, the gradient of the norm of x: the gradient of x, which overwrites it, and those of gamma and beta, which
/// are added to `sums`.
template <class T>
[[gnu::noinline]] void norm_back(const key_norm<T>& norm, const T* x, idx_t dim, T* dy, const norm_sums<T>& sums) {
  const T share = T(1) / static_cast<T>(dim);
  T mean = 0, variance = 0, power = 1, by = 0, by_x = 0;
  const auto measure = [&] {
    T sum = 0, squares = 0;
    for (idx_t d = 0; d < dim; ++d) sum += x[d] * power;
    mean = sum * share;
    for (idx_t d = 0; d < dim; ++d) squares += (x[d] * power - mean) * (x[d] * power - mean);
    variance = squares * share + norm.eps * power * power;
  };
  measure();
  power = norm.power_for(x, dim, variance);
  if (power != T(1)) measure();
  const T factor = T(1) / std::sqrt(variance);
  for (idx_t d = 0; d < dim; ++d) {
    const T normed = (x[d] * power - mean) * factor;
    sums.gamma[d] += dy[d] * normed;
    sums.beta()[d] += dy[d];
    dy[d] *= norm.gamma[d];
    by += dy[d];
    by_x += dy[d] * normed;
  }
  by *= share, by_x *= share;
  for (idx_t d = 0; d < dim; ++d)
    dy[d] = factor * power * (dy[d] - by - (x[d] * power - mean) * factor * by_x);
}

}}}  // namespace attn::ATTN_ISA::detail
