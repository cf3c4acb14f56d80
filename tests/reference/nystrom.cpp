#include "reference/nystrom.hpp"

#include <Eigen/SVD>
#include <algorithm>
#include <numeric>
#include <type_traits>

#include "reference/variable.hpp"

namespace reference {
namespace {

template <class N>
struct matrix {
  idx_t rows = 0, cols = 0;
  std::vector<N> data;

  matrix(idx_t r, idx_t c) : rows(r), cols(c), data(static_cast<std::size_t>(r * c), N(0)) {}
  N& operator()(idx_t i, idx_t j) { return data[static_cast<std::size_t>(i * cols + j)]; }
  const N& operator()(idx_t i, idx_t j) const { return data[static_cast<std::size_t>(i * cols + j)]; }

  matrix transposed() const {
    matrix to(cols, rows);
    for (idx_t i = 0; i < rows; ++i)
      for (idx_t j = 0; j < cols; ++j) to(j, i) = (*this)(i, j);
    return to;
  }
  friend matrix operator*(const matrix& a, const matrix& b) {
    matrix c(a.rows, b.cols);
    for (idx_t i = 0; i < a.rows; ++i)
      for (idx_t k = 0; k < a.cols; ++k)
        for (idx_t j = 0; j < b.cols; ++j) c(i, j) += a(i, k) * b(k, j);
    return c;
  }
};

// a 1 + b x
template <class N>
matrix<N> shifted(const N& a, const N& b, matrix<N> x) {
  for (N& value : x.data) value *= b;
  for (idx_t i = 0; i < x.rows; ++i) x(i, i) += a;
  return x;
}

template <class N>
matrix<N> rows_of(const tensor<N>& x, idx_t b, idx_t h, idx_t count) {
  matrix<N> rows(count, x.dim());
  for (idx_t i = 0; i < count; ++i)
    for (idx_t d = 0; d < x.dim(); ++d) rows(i, d) = x(b, h, i, d);
  return rows;
}

// Rows list[0], list[1], ...
template <class N>
matrix<N> chosen(const matrix<N>& x, const std::vector<idx_t>& list) {
  matrix<N> rows(std::ssize(list), x.cols);
  for (idx_t i = 0; i < rows.rows; ++i)
    for (idx_t d = 0; d < x.cols; ++d) rows(i, d) = x(list[static_cast<std::size_t>(i)], d);
  return rows;
}

// The means of the rows that are listed, of the segments that have one.
template <class N>
matrix<N> segment_means(const matrix<N>& x, idx_t count, const std::vector<idx_t>& list) {
  matrix<N> means(count, x.cols);
  std::vector<idx_t> segments;
  for (idx_t a = 0; a < count; ++a) {
    const auto begin = std::lower_bound(list.begin(), list.end(), a * x.rows / count);
    const auto end = std::lower_bound(list.begin(), list.end(), (a + 1) * x.rows / count);
    if (begin != end) segments.push_back(a);
    for (auto i = begin; i != end; ++i)
      for (idx_t d = 0; d < x.cols; ++d) means(a, d) += x(*i, d) / N(static_cast<double>(end - begin));
  }
  return chosen(means, segments);
}
template <class N>
matrix<N> segment_means(const matrix<N>& x, idx_t count) {
  std::vector<idx_t> all(static_cast<std::size_t>(x.rows));
  std::iota(all.begin(), all.end(), idx_t(0));
  return segment_means(x, count, all);
}

// softmax over the columns of s q kᵀ, row by row.
template <class N>
matrix<N> softmax_weights(double scale, const matrix<N>& q, const matrix<N>& k) {
  using std::exp;
  matrix<N> weights = q * k.transposed();
  for (idx_t i = 0; i < q.rows; ++i) {
    double largest = -infinity;
    N sum = 0;
    for (idx_t j = 0; j < k.rows; ++j) {
      weights(i, j) *= N(scale);
      largest = std::max(largest, static_cast<double>(weights(i, j)));
    }
    for (idx_t j = 0; j < k.rows; ++j) sum += weights(i, j) = exp(weights(i, j) - N(largest));
    for (idx_t j = 0; j < k.rows; ++j) weights(i, j) /= sum;
  }
  return weights;
}

// The largest sums of a column and of a row.
template <class N>
struct largest_sums {
  N column = 0, row = 0;

  void raise(const largest_sums& other) {
    if (other.column > column) column = other.column;
    if (other.row > row) row = other.row;
  }
};
template <class N>
N largest_column(const matrix<N>& a) {
  N largest = 0;
  for (idx_t j = 0; j < a.cols; ++j) {
    N sum = 0;
    for (idx_t i = 0; i < a.rows; ++i) sum += a(i, j);
    if (sum > largest) largest = sum;
  }
  return largest;
}
template <class N>
largest_sums<N> sums_of(const matrix<N>& a) {
  return {largest_column(a), largest_column(a.transposed())};
}

template <class N>
matrix<N> iterated_inverse(const matrix<N>& a, const largest_sums<N>& sums, idx_t iterations) {
  matrix<N> z = shifted(N(0), N(1) / (sums.column * sums.row), a.transposed());
  for (idx_t n = 0; n < iterations; ++n) {
    const matrix<N> az = a * z;
    const matrix<N> u = shifted(N(15), N(-1), az * shifted(N(7), N(-1), az));
    z = shifted(N(0), N(0.25), z * shifted(N(13), N(-1), az * u));
  }
  return z;
}

Eigen::JacobiSVD<Eigen::MatrixXd> decomposed(const matrix<double>& a) {
  Eigen::MatrixXd x(a.rows, a.cols);
  for (idx_t i = 0; i < a.rows; ++i)
    for (idx_t j = 0; j < a.cols; ++j) x(i, j) = a(i, j);
  return Eigen::JacobiSVD<Eigen::MatrixXd>(x, Eigen::ComputeFullU | Eigen::ComputeFullV);
}

matrix<double> exact_inverse(const matrix<double>& a, double cutoff) {
  const auto svd = decomposed(a);
  const auto& values = svd.singularValues();
  Eigen::MatrixXd inverse = Eigen::MatrixXd::Zero(a.cols, a.rows);
  for (idx_t n = 0; n < values.size(); ++n)
    if (values[n] > 1e-14 * values[0])
      inverse += svd.matrixV().col(n) * svd.matrixU().col(n).transpose() * values[n] /
                 (values[n] * values[n] + cutoff * cutoff * (values[0] * values[0] - values[n] * values[n]));
  matrix<double> to(a.cols, a.rows);
  for (idx_t i = 0; i < to.rows; ++i)
    for (idx_t j = 0; j < to.cols; ++j) to(i, j) = inverse(i, j);
  return to;
}

// Gauss and Jordan, with pivots.
template <class N>
matrix<N> inverse_by_elimination(matrix<N> a) {
  const idx_t m = a.rows;
  matrix<N> b(m, m);
  for (idx_t i = 0; i < m; ++i) b(i, i) = 1;
  for (idx_t n = 0; n < m; ++n) {
    idx_t pivot = n;
    for (idx_t i = n; i < m; ++i)
      if (std::abs(static_cast<double>(a(i, n))) > std::abs(static_cast<double>(a(pivot, n)))) pivot = i;
    for (idx_t j = 0; j < m; ++j) std::swap(a(n, j), a(pivot, j)), std::swap(b(n, j), b(pivot, j));
    const N by = N(1) / a(n, n);
    for (idx_t j = 0; j < m; ++j) a(n, j) *= by, b(n, j) *= by;
    for (idx_t i = 0; i < m; ++i) {
      if (i == n) continue;
      const N factor = a(i, n);
      for (idx_t j = 0; j < m; ++j) a(i, j) -= factor * a(n, j), b(i, j) -= factor * b(n, j);
    }
  }
  return b;
}

// With singular values s, V s / (s² + c² (S² - s²)) Uᵀ = ((1 - c²) AᵀA + c² S²)⁻¹ Aᵀ. The largest one is S = uᵀ A v,
// whose derivative is that with u and v constant.
matrix<variable> exact_inverse(const matrix<variable>& a, double cutoff) {
  if (cutoff == 0) return inverse_by_elimination(a.transposed() * a) * a.transposed();
  matrix<double> values(a.rows, a.cols);
  for (std::size_t n = 0; n < a.data.size(); ++n) values.data[n] = a.data[n].value();
  const auto svd = decomposed(values);
  variable largest = 0;
  for (idx_t i = 0; i < a.rows; ++i)
    for (idx_t j = 0; j < a.cols; ++j) largest += variable(svd.matrixU()(i, 0) * svd.matrixV()(j, 0)) * a(i, j);
  const double squared = cutoff * cutoff;
  return inverse_by_elimination(
             shifted(variable(squared) * largest * largest, variable(1 - squared), a.transposed() * a)) *
         a.transposed();
}

// One head, true rows only. Landmarks of keys of which none is seen are left out.
template <class N>
struct nystrom_head {
  matrix<N> q, k, v;
  std::vector<idx_t> seen;  // keys

  matrix<N> seen_keys() const { return chosen(k, seen); }
  matrix<N> seen_values() const { return chosen(v, seen); }
  matrix<N> key_landmarks(idx_t m) const { return segment_means(k, m, seen); }

  bool whole(idx_t m) const { return q.rows <= m || k.rows <= m; }
  matrix<N> landmark_weights(double scale, idx_t m) const {
    return softmax_weights(scale, segment_means(q, m), key_landmarks(m));
  }
};

}  // namespace

template <class N>
tensor<N> nystrom(const tensor<N>& q, const tensor<N>& k, const tensor<N>& v, const tensor<N>& convolution,
                  const nystrom_options& options) {
  tensor<N> into(q.batch(), q.heads(), q.length(), v.dim());
  const double scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(q.dim())));
  const idx_t m = options.landmarks;
  const auto head = [&](idx_t b, idx_t h) {
    const idx_t kv = h / (q.heads() / k.heads());
    nystrom_head<N> one{rows_of(q, b, h, true_length(options.lengths, options.query_lengths, b, q.length())),
                        rows_of(k, b, kv, true_length(options.lengths, options.key_lengths, b, k.length())),
                        rows_of(v, b, kv, true_length(options.lengths, options.key_lengths, b, k.length())), {}};
    for (idx_t j = 0; j < one.k.rows; ++j)
      if (!key_hidden(options.key_mask, b, j)) one.seen.push_back(j);
    return one;
  };
  largest_sums<N> common;  // of the whole batch
  for (idx_t b = 0; b < q.batch() && options.inverse == pinv::whole_batch; ++b)
    for (idx_t h = 0; h < q.heads(); ++h)
      if (const auto x = head(b, h); !x.whole(m) && !x.seen.empty()) common.raise(sums_of(x.landmark_weights(scale, m)));

  for (idx_t b = 0; b < q.batch(); ++b)
    for (idx_t h = 0; h < q.heads(); ++h) {
      const nystrom_head<N> x = head(b, h);
      if (x.seen.empty()) continue;
      matrix<N> out(0, 0);
      if (x.whole(m)) {
        out = softmax_weights(scale, x.q, x.seen_keys()) * x.seen_values();
      } else {
        const matrix<N> a = x.landmark_weights(scale, m);
        const auto sums = options.inverse == pinv::whole_batch ? common : sums_of(a);
        const matrix<N> inverse = options.inverse == pinv::exact ? exact_inverse(a, options.cutoff)
                                                                 : iterated_inverse(a, sums, options.iterations);
        out = softmax_weights(scale, x.q, x.key_landmarks(m)) *
              (inverse * (softmax_weights(scale, segment_means(x.q, m), x.seen_keys()) * x.seen_values()));
      }
      for (idx_t i = 0; i < x.q.rows; ++i)
        for (idx_t d = 0; d < v.dim(); ++d) {
          N sum = out(i, d);
          const idx_t width = convolution.dim(), position = i + x.k.rows - x.q.rows;
          for (idx_t p = 0; p < width; ++p) {
            const idx_t j = position + p - width / 2;
            if (j >= 0 && j < x.k.rows && !key_hidden(options.key_mask, b, j)) sum += convolution(0, 0, h, p) * x.v(j, d);
          }
          into(b, h, i, d) = sum;
        }
    }
  return into;
}

template tensor<double> nystrom(const tensor<double>&, const tensor<double>&, const tensor<double>&,
                                const tensor<double>&, const nystrom_options&);
template tensor<variable> nystrom(const tensor<variable>&, const tensor<variable>&, const tensor<variable>&,
                                  const tensor<variable>&, const nystrom_options&);

result nystrom(const tensor<double>& q, const tensor<double>& k, const tensor<double>& v,
               const nystrom_options& options) {
  result into = empty_result(q, v);
  into.out = nystrom(q, k, v, options.convolution, options);
  return into;
}

}  // namespace reference
