#include "reference/nystrom.hpp"

#include <Eigen/SVD>

namespace reference {
namespace {

using matrix = Eigen::MatrixXd;

matrix rows_of(const tensor<double>& x, index b, index h, index count) {
  matrix rows(count, x.dim());
  for (index i = 0; i < count; ++i)
    for (index d = 0; d < x.dim(); ++d) rows(i, d) = x(b, h, i, d);
  return rows;
}

matrix segment_means(const matrix& x, index count) {
  matrix means = matrix::Zero(count, x.cols());
  for (index a = 0; a < count; ++a) {
    const index begin = a * x.rows() / count, end = (a + 1) * x.rows() / count;
    for (index i = begin; i < end; ++i) means.row(a) += x.row(i) / static_cast<double>(end - begin);
  }
  return means;
}

// softmax over the columns of s q kᵀ, row by row.
matrix softmax_weights(double scale, const matrix& q, const matrix& k) {
  matrix weights(q.rows(), k.rows());
  for (index i = 0; i < q.rows(); ++i) {
    double largest = -infinity, sum = 0;
    for (index j = 0; j < k.rows(); ++j) largest = std::max(largest, weights(i, j) = scale * q.row(i).dot(k.row(j)));
    for (index j = 0; j < k.rows(); ++j) sum += weights(i, j) = std::exp(weights(i, j) - largest);
    weights.row(i) /= sum;
  }
  return weights;
}

matrix iterated_inverse(const matrix& a, double norms, index iterations) {
  const matrix one = matrix::Identity(a.rows(), a.rows());
  matrix z = a.transpose() / norms;
  for (index n = 0; n < iterations; ++n) {
    const matrix az = a * z;
    z = (0.25 * z * (13 * one - az * (15 * one - az * (7 * one - az)))).eval();
  }
  return z;
}

matrix exact_inverse(const matrix& a, double cutoff) {
  const Eigen::JacobiSVD<matrix> svd(a, Eigen::ComputeFullU | Eigen::ComputeFullV);
  const auto& values = svd.singularValues();
  matrix inverse = matrix::Zero(a.cols(), a.rows());
  for (index n = 0; n < values.size(); ++n)
    if (values[n] > 1e-14 * values[0])
      inverse += svd.matrixV().col(n) * svd.matrixU().col(n).transpose() * values[n] /
                 (values[n] * values[n] + cutoff * cutoff * (values[0] * values[0] - values[n] * values[n]));
  return inverse;
}

// One head, true rows only.
struct nystrom_head {
  matrix q, k, v;

  bool whole(index m) const { return q.rows() <= m || k.rows() <= m; }
  matrix landmark_weights(double scale, index m) const {
    return softmax_weights(scale, segment_means(q, m), segment_means(k, m));
  }
};

}  // namespace

result nystrom(const tensor<double>& q, const tensor<double>& k, const tensor<double>& v,
                      const nystrom_options& options) {
  result into = empty_result(q, v);
  const double scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(q.dim())));
  const index m = options.landmarks;
  const auto head = [&](index b, index h) {
    const index kv = h / (q.heads() / k.heads());
    return nystrom_head{rows_of(q, b, h, true_length(options.lengths, options.query_lengths, b, q.length())),
                        rows_of(k, b, kv, true_length(options.lengths, options.key_lengths, b, k.length())),
                        rows_of(v, b, kv, true_length(options.lengths, options.key_lengths, b, k.length()))};
  };
  double columns = 0, rows = 0;  // the largest sums of the whole batch
  for (index b = 0; b < q.batch() && options.inverse == pinv::whole_batch; ++b)
    for (index h = 0; h < q.heads(); ++h) {
      const nystrom_head x = head(b, h);
      if (x.whole(m)) continue;
      const matrix a = x.landmark_weights(scale, m);
      columns = std::max(columns, a.colwise().sum().maxCoeff()), rows = std::max(rows, a.rowwise().sum().maxCoeff());
    }

  for (index b = 0; b < q.batch(); ++b)
    for (index h = 0; h < q.heads(); ++h) {
      const nystrom_head x = head(b, h);
      if (x.k.rows() == 0) continue;
      matrix out;
      if (x.whole(m)) {
        out = softmax_weights(scale, x.q, x.k) * x.v;
      } else {
        const matrix a = x.landmark_weights(scale, m);
        double norms = a.colwise().sum().maxCoeff() * a.rowwise().sum().maxCoeff();
        if (options.inverse == pinv::whole_batch) norms = columns * rows;
        const matrix inverse = options.inverse == pinv::exact ? exact_inverse(a, options.cutoff)
                                                              : iterated_inverse(a, norms, options.iterations);
        out = softmax_weights(scale, x.q, segment_means(x.k, m)) *
              (inverse * (softmax_weights(scale, segment_means(x.q, m), x.k) * x.v));
      }
      for (index i = 0; i < x.q.rows(); ++i)
        for (index d = 0; d < v.dim(); ++d) {
          double sum = out(i, d);
          const index width = options.convolution.dim(), position = i + x.k.rows() - x.q.rows();
          for (index p = 0; p < width; ++p) {
            const index j = position + p - width / 2;
            if (j >= 0 && j < x.k.rows()) sum += options.convolution(0, 0, h, p) * x.v(j, d);
          }
          into.out(b, h, i, d) = sum;
        }
    }
  return into;
}

}  // namespace reference
