// attn: the pseudo-inverse of a small square matrix, applied to values: w = A^+ b.
//
// The iteration of Razavi et al. 2014, as Xiong et al. 2021 use it, consists of products alone. The exact one is a
// one-sided Jacobi decomposition (Hestenes 1958), which finds small singular values to high relative accuracy, in
// scratch memory: Eigen's decompositions allocate theirs, and take seconds to compile.
#pragma once

#include <attn/low_rank/detail/panel_product.hpp>

#include <cmath>
#include <limits>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The norms the iteration starts from: the largest sums of a column and of a row.
template <class T>
struct start_norms {
  T column = T(0), row = T(0);

  /// Of A [m, m], contiguous, whose entries are not negative; `sums` has room for m numbers.
  static start_norms of(const T* a, idx_t m, T* sums) {
    start_norms norms;
    std::fill_n(sums, m, T(0));
    for (idx_t i = 0; i < m; ++i) {
      T row = T(0);
      for (idx_t j = 0; j < m; ++j) row += a[i * m + j], sums[j] += a[i * m + j];
      norms.row = (std::max)(norms.row, row);
    }
    for (idx_t j = 0; j < m; ++j) norms.column = (std::max)(norms.column, sums[j]);
    return norms;
  }
  void raise(const start_norms& other) {
    column = (std::max)(column, other.column), row = (std::max)(row, other.row);
  }
};

/// Z <- Z (13 - AZ (15 - AZ (7 - AZ))) / 4 from Z = A^T / (norms of A).
template <class T>
struct iterative_inverse {
  panel_matrix<T> a, z, az, t, u, b;

  static iterative_inverse layout(arena& memory, idx_t m, idx_t cols) {
    const auto square = [&] { return panel_matrix<T>::layout(memory, m, m); };
    iterative_inverse x;
    for (auto* matrix : {&x.a, &x.z, &x.az, &x.t, &x.u}) *matrix = square();
    x.b = panel_matrix<T>::layout(memory, m, cols);
    return x;
  }

  /// `matrix` [m, m] and `values` [m, cols, one row every `stride`]; values become A^+ values, panels rounded up.
  void apply(const T* matrix, const start_norms<T>& norms, idx_t iterations, T* values, idx_t stride) {
    const idx_t m = a.rows;
    for (auto* x : {&a, &z, &az, &t, &u, &b}) x->clear();
    const T start = T(1) / (norms.column * norms.row);
    for (idx_t i = 0; i < m; ++i)
      for (idx_t j = 0; j < m; ++j) *a.at(i, j) = matrix[i * m + j], *z.at(j, i) = start * matrix[i * m + j];
    for (idx_t n = 0; n < iterations; ++n) {
      matrix_product(a, z, T(0), T(1), az);
      for (idx_t k = 0; k < t.size(); ++k) t.data[k] = -az.data[k];
      for (idx_t i = 0; i < m; ++i) *t.at(i, i) += T(7);
      matrix_product(az, t, T(15), T(-1), u);
      matrix_product(az, u, T(13), T(-1), t);
      matrix_product(z, t, T(0), T(0.25), u);
      std::swap(z, u);
    }
    pack_panels<T>([&](idx_t i) { return values + i * stride; }, 0, m, b.cols, 1, b.data, b.capacity);
    matrix_product(z, b, T(1), values, stride, panel_width<T>);
  }
};

/// By singular values s, each inverted to s / (s^2 + cutoff^2 (largest^2 - s^2)); in double.
///
/// On the queries and keys of a trained encoder A is nearly singular, and the components of small singular values are
/// noise. Error of the whole against full softmax, layers 0 / 1, 64 landmarks: 0.30 / 0.11 with 6 iterations; 22 / 0.85
/// with cutoff 0, 0.32 / 0.10 with 0.01, 0.303 / 0.106 with 0.03 (the default), 0.31 / 0.14 with 0.1. With 0.03 it is
/// below that of the iteration for 16, 32, 64, 128 and 256 landmarks. A sharp cut is worse at its best, 0.312 / 0.105.
struct exact_inverse {
  static constexpr int lanes = width<double>;

  idx_t size = 0, stride = 0, cols = 0;
  double *rows = nullptr, *turns = nullptr;  // J A = S: rows that become orthogonal, and J
  double *product = nullptr, *result = nullptr;

  static exact_inverse layout(arena& memory, idx_t m, idx_t cols) {
    const idx_t stride = round_up(m, lanes);
    return {m, stride, cols, memory.allocate<double>(m * stride), memory.allocate<double>(m * stride),
            memory.allocate<double>(m * cols), memory.allocate<double>(m * cols)};
  }

  static double dot(const double* x, const double* y, idx_t n) {
    packet<double> sum = zero<double>();
    for (idx_t i = 0; i < n; i += lanes) sum = fma(load<double>(x + i), load<double>(y + i), sum);
    return sum_lanes(sum);
  }
  /// x, y = c x - s y, s x + c y
  static void rotate(double* x, double* y, idx_t n, double c, double s) {
    const packet<double> cosine = broadcast<double>(c), sine = broadcast<double>(s);
    for (idx_t i = 0; i < n; i += lanes) {
      const packet<double> a = load<double>(x + i), b = load<double>(y + i);
      store<double>(x + i, sub(mul(cosine, a), mul(sine, b)));
      store<double>(y + i, fma(cosine, b, mul(sine, a)));
    }
  }

  double squared_norm(idx_t i) const { return dot(rows + i * stride, rows + i * stride, stride); }

  /// Rotates every two rows until they are orthogonal.
  void decompose() const {
    constexpr double negligible = 2 * std::numeric_limits<double>::epsilon();
    bool rotated = true;
    for (int sweep = 0; rotated && sweep < 40; ++sweep) {
      rotated = false;
      for (idx_t i = 0; i < size; ++i)
        for (idx_t k = i + 1; k < size; ++k) {
          double *x = rows + i * stride, *y = rows + k * stride;
          const double xx = dot(x, x, stride), yy = dot(y, y, stride), xy = dot(x, y, stride);
          if (!(std::abs(xy) > negligible * std::sqrt(xx) * std::sqrt(yy))) continue;
          rotated = true;
          const double ratio = (yy - xx) / (2 * xy);
          const double tangent = std::copysign(1 / (std::abs(ratio) + std::hypot(1, ratio)), ratio);
          const double c = 1 / std::hypot(1, tangent);
          rotate(x, y, stride, c, c * tangent);
          rotate(turns + i * stride, turns + k * stride, stride, c, c * tangent);
        }
    }
  }

  template <class T>
  void apply(const T* matrix, double cutoff, T* values, idx_t value_stride) const {
    std::fill_n(rows, size * stride, 0.0);
    std::fill_n(turns, size * stride, 0.0);
    for (idx_t i = 0; i < size; ++i) {
      for (idx_t j = 0; j < size; ++j) rows[i * stride + j] = static_cast<double>(matrix[i * size + j]);
      turns[i * stride + i] = 1;
    }
    decompose();
    double largest = 0;
    for (idx_t i = 0; i < size; ++i)
      if (const double square = squared_norm(i); !(square <= largest)) largest = square;
    // A^+ b = S^T (J b / s^2), s the lengths of the rows of S; lengths that are 0 but for rounding count as 0
    const double none = static_cast<double>(size) * static_cast<double>(std::numeric_limits<T>::epsilon());
    std::fill_n(product, size * cols, 0.0);
    std::fill_n(result, size * cols, 0.0);
    for (idx_t i = 0; i < size; ++i) {
      const double square = squared_norm(i);
      if (square <= none * none * largest) continue;
      double* const c = product + i * cols;
      for (idx_t j = 0; j < size; ++j) {
        const double turn = turns[i * stride + j] / (square + cutoff * cutoff * (largest - square));
        for (idx_t d = 0; d < cols; ++d) c[d] += turn * static_cast<double>(values[j * value_stride + d]);
      }
      for (idx_t j = 0; j < size; ++j)
        for (idx_t d = 0; d < cols; ++d) result[j * cols + d] += rows[i * stride + j] * c[d];
    }
    for (idx_t j = 0; j < size; ++j)
      for (idx_t d = 0; d < cols; ++d) values[j * value_stride + d] = static_cast<T>(result[j * cols + d]);
  }
};

}}}  // namespace attn::ATTN_ISA::detail
