// attn: roots of unity, exact to the last bits of double.
#pragma once

#include <attn/core/execution.hpp>

#include <cmath>
#include <complex>
#include <numbers>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// e^(-2 pi i k / n) for k >= 0. The angle is brought into the first octant as a fraction, so that cos and sin never
/// see a rounded multiple of pi.
inline std::complex<double> root_of_unity(idx_t k, idx_t n) {
  idx_t a = 8 * (k % n);  // the circle is 8 n, an octant n
  const auto fold = [&a](idx_t half) {
    const bool beyond = a > half;
    if (beyond) a = 2 * half - a;
    return beyond;
  };
  const bool below = fold(4 * n), left = fold(2 * n), steep = fold(n);
  const double angle = std::numbers::pi / 4 * (static_cast<double>(a) / static_cast<double>(n));
  double c = std::cos(angle), s = std::sin(angle);
  if (steep) std::swap(c, s);
  return {left ? -c : c, below ? s : -s};
}

/// All powers of one root of unity, each the product of two from tables of about sqrt(n): n sines and cosines would
/// take as long as a transform.
class root_table {
 public:
  static root_table layout(arena& memory, idx_t n) {
    root_table table;
    table.n_ = n;
    while (table.step_ * table.step_ < n) table.step_ *= 2;
    table.fine_ = memory.allocate<std::complex<double>>(table.step_);
    table.coarse_ = memory.allocate<std::complex<double>>((n + table.step_ - 1) / table.step_);
    return table;
  }
  void fill() const {
    for (idx_t k = 0; k < step_; ++k) fine_[k] = root_of_unity(k, n_);
    for (idx_t k = 0; k * step_ < n_; ++k) coarse_[k] = root_of_unity(k * step_, n_);
  }

  /// e^(-2 pi i k / n), 0 <= k < n
  std::complex<double> operator()(idx_t k) const {
    const std::complex<double> a = coarse_[k / step_], b = fine_[k % step_];
    return {a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real()};
  }

 private:
  idx_t n_ = 1, step_ = 1;
  std::complex<double>*fine_ = nullptr, *coarse_ = nullptr;
};

}}}  // namespace attn::ATTN_ISA::detail
