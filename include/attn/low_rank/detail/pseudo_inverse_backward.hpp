// attn: the backward pass of the pseudo-inverse of a small square matrix (pseudo_inverse.hpp).
//
// With Y = A Z, T1 = 7 - Y, U1 = 15 - Y T1, T2 = 13 - Y U1, a step is Z' = Z T2 / 4, and its backward pass from dZ'
//   dT2 = Z^T dZ' / 4,  dU1 = -Y^T dT2,  dT1 = -Y^T dU1,  dY = -dT2 U1^T - dU1 T1^T - dT1,
//   dA += dY Z^T,  dZ = dZ' T2^T / 4 + A^T dY.
// All of Z, Y, T1, U1, T2 enter transposed: the iteration is run transposed, and every product is one of plain
// matrices.
#pragma once

#include <attn/low_rank/detail/pseudo_inverse.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <class T>
void transpose(const panel_matrix<T>& x, const panel_matrix<T>& to) {
  for (idx_t i = 0; i < x.rows; ++i)
    for (idx_t j = 0; j < x.cols; ++j) *to.at(j, i) = *x.at(i, j);
}
/// x, contiguous, or its transpose.
template <class T, class U>
void read_square(const U* x, const panel_matrix<T>& to, bool transposed) {
  for (idx_t i = 0; i < to.rows; ++i)
    for (idx_t j = 0; j < to.rows; ++j)
      *to.at(i, j) = static_cast<T>(x[transposed ? j * to.rows + i : i * to.rows + j]);
}
/// x += factor y
template <class T>
void add_to(const panel_matrix<T>& x, const panel_matrix<T>& y, T factor) {
  for (idx_t n = 0; n < x.size(); ++n) x.data[n] += factor * y.data[n];
}

/// The iterates, transposed, of one matrix.
template <class T>
struct inverse_iterates {
  panel_matrix<T> a;   // A^T
  panel_matrix<T>* z;  // [iterations + 1]: Z^T
  idx_t iterations;

  static inverse_iterates layout(arena& memory, idx_t m, idx_t iterations) {
    const auto square = [m](arena& from) { return panel_matrix<T>::layout(from, m, m); };
    return {square(memory), memory.allocate_list(iterations + 1, square), iterations};
  }
};

template <class T>
struct iterative_inverse_backward {
  // y, t1, u1, t2 are transposed, the others are not
  panel_matrix<T> y, t1, u1, t2, d_z, d_next, d_t2, d_u1, d_y, d_a;

  static iterative_inverse_backward layout(arena& memory, idx_t m) {
    iterative_inverse_backward x;
    for (auto* matrix : {&x.y, &x.t1, &x.u1, &x.t2, &x.d_z, &x.d_next, &x.d_t2, &x.d_u1, &x.d_y, &x.d_a})
      *matrix = panel_matrix<T>::layout(memory, m, m);
    return x;
  }

  void clear() const {
    for (const auto* x : {&y, &t1, &u1, &t2, &d_z, &d_next, &d_t2, &d_u1, &d_y, &d_a}) x->clear();
  }
  void factors(const inverse_iterates<T>& from, idx_t n) const {
    matrix_product(from.z[n], from.a, T(0), T(1), y);
    for (idx_t k = 0; k < t1.size(); ++k) t1.data[k] = -y.data[k];
    for (idx_t i = 0; i < t1.rows; ++i) *t1.at(i, i) += T(7);
    matrix_product(t1, y, T(15), T(-1), u1);
    matrix_product(u1, y, T(13), T(-1), t2);
  }

  /// The iterates of `matrix` [m, m], from A^T / (norms).
  void iterate(const T* matrix, const start_norms<T>& norms, const inverse_iterates<T>& to) const {
    clear();
    to.a.clear(), to.z[0].clear();
    const T start = T(1) / (norms.column * norms.row);
    read_square(matrix, to.a, true);
    read_square(matrix, to.z[0], false);
    for (idx_t k = 0; k < to.z[0].size(); ++k) to.z[0].data[k] *= start;
    for (idx_t n = 0; n < to.iterations; ++n) {
      factors(to, n);
      to.z[n + 1].clear();
      matrix_product(t2, to.z[n], T(0), T(0.25), to.z[n + 1]);
    }
  }

  /// From d_z, the gradient of the last iterate: d_a becomes that of A, without the part through the norms. Returns the
  /// sum of dZ_0 Z_0: the gradient of each norm is minus that sum over the norm.
  T back(const inverse_iterates<T>& from, const start_norms<T>& norms) {
    d_a.clear();
    for (idx_t n = from.iterations - 1; n >= 0; --n) {
      const panel_matrix<T>& z = from.z[n];
      factors(from, n);
      matrix_product(z, d_z, T(0), T(0.25), d_t2);
      matrix_product(d_z, t2, T(0), T(0.25), d_next);
      matrix_product(y, d_t2, T(0), T(-1), d_u1);
      matrix_product(d_t2, u1, T(0), T(-1), d_y);
      matrix_product(d_u1, t1, T(0), T(1), t2);
      add_to(d_y, t2, T(-1));
      matrix_product(y, d_u1, T(0), T(1), t2);  // -dT1
      add_to(d_y, t2, T(1));
      matrix_product(d_y, z, T(0), T(1), t2);
      add_to(d_a, t2, T(1));
      matrix_product(from.a, d_y, T(0), T(1), t2);
      add_to(d_next, t2, T(1));
      std::swap(d_z, d_next);
    }
    const T start = T(1) / (norms.column * norms.row);
    T inner = T(0);
    for (idx_t i = 0; i < d_z.rows; ++i)
      for (idx_t j = 0; j < d_z.rows; ++j) {
        inner += *d_z.at(i, j) * *from.z[0].at(j, i);
        *d_a.at(j, i) += start * *d_z.at(i, j);
      }
    return inner;
  }
};

/// The gradient of A through H = K A^T, K the inverse of B = (1 - c^2) A^T A + c^2 S^2, S the largest singular value
/// and c the cutoff: with X = K dH, M = X H^T and the singular vectors u, v of S,
///   dA = X^T - (1 - c^2) A (M + M^T) - 2 c^2 S tr(M) u v^T.
/// Where c is 0 and singular values are, K is the pseudo-inverse of B, and dA has H^T H dH^T (1 - H A) too.
struct exact_inverse_backward {
  using matrix = panel_matrix<double>;
  matrix a, h, k, d_h, x, y, z, right;

  static exact_inverse_backward layout(arena& memory, idx_t m) {
    exact_inverse_backward b;
    for (matrix* one : {&b.a, &b.h, &b.k, &b.d_h, &b.x, &b.y, &b.z, &b.right}) *one = matrix::layout(memory, m, m);
    return b;
  }
  struct spectrum {
    double largest = 0;  // squared
    idx_t at = 0;
    bool singular = false;
  };

  /// h and k from the decomposition of a matrix, whose rows are the rotated rows of A.
  spectrum invert(const exact_inverse& from, double cutoff, double epsilon) const {
    for (const matrix* one : {&a, &h, &k, &d_h, &x, &y, &z, &right}) one->clear();
    const idx_t m = from.size;
    spectrum all;
    for (idx_t i = 0; i < m; ++i)
      if (const double square = from.squared_norm(i); !(square <= all.largest)) all.largest = square, all.at = i;
    const double none = static_cast<double>(m) * epsilon, squared = cutoff * cutoff;
    const auto counts = [&](double square) { return !(square <= none * none * all.largest); };
    for (idx_t i = 0; i < m; ++i) all.singular |= !counts(from.squared_norm(i));
    const double rest = all.singular && cutoff > 0 ? 1 / (squared * all.largest) : 0;  // K where singular values are 0
    for (idx_t i = 0; i < m; ++i) {
      const double square = from.squared_norm(i), inverse = 1 / (square + squared * (all.largest - square));
      if (!counts(square)) continue;
      for (idx_t j = 0; j < m; ++j) {
        *x.at(j, i) = from.rows[i * from.stride + j];
        *y.at(i, j) = from.turns[i * from.stride + j] * inverse;
        *z.at(i, j) = from.rows[i * from.stride + j] * ((inverse - rest) / square);
      }
    }
    matrix_product(x, y, 0.0, 1.0, h);
    matrix_product(x, z, 0.0, 1.0, k);
    for (idx_t i = 0; i < m; ++i) *k.at(i, i) += rest;
    return all;
  }

  /// From d_h, after invert(); `weights` is A. The result is in y.
  template <class T>
  void back(const T* weights, const exact_inverse& from, double cutoff, const spectrum& all) const {
    const idx_t m = from.size;
    const double squared = cutoff * cutoff;
    read_square(weights, a, false);
    matrix_product(k, d_h, 0.0, 1.0, x);
    transpose(h, right);
    matrix_product(x, right, 0.0, 1.0, z);  // M
    double trace = 0;
    for (idx_t i = 0; i < m; ++i) trace += *z.at(i, i);
    transpose(z, right);
    add_to(right, z, 1.0);
    matrix_product(a, right, 0.0, 1.0, z);
    transpose(x, y);
    add_to(y, z, squared - 1);
    for (idx_t i = 0; i < m; ++i)
      for (idx_t j = 0; j < m; ++j)
        *y.at(i, j) -= 2 * squared * trace * from.turns[all.at * from.stride + i] * from.rows[all.at * from.stride + j];
    if (!all.singular || cutoff > 0) return;
    transpose(d_h, right);
    matrix_product(h, right, 0.0, 1.0, x);
    transpose(h, right);
    matrix_product(right, x, 0.0, 1.0, z);  // H^T H dH^T
    matrix_product(h, a, 0.0, 1.0, right);
    for (idx_t n = 0; n < right.size(); ++n) right.data[n] = -right.data[n];
    for (idx_t i = 0; i < m; ++i) *right.at(i, i) += 1;
    matrix_product(z, right, 0.0, 1.0, x);
    add_to(y, x, 1.0);
  }
};

}}}  // namespace attn::ATTN_ISA::detail
