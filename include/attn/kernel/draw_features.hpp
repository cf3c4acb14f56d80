// attn: random features for performer and rfa, drawn or the caller's own.
//
//   auto features = attn::draw_features<float>(256, 64, {.seed = 7});     // 256 rows of dim 64, for all heads
//   attn::performer(q, k, v, out, features);
//
// One seed gives the same bits with every compiler, on every machine. Where a matrix of the caller's is as good: any
// view [H, Hkv or 1, count, dim], or an Eigen matrix [count, dim], does.
#pragma once

#include <attn/core/detail/check.hpp>
#include <attn/core/random.hpp>

#include <vector>

namespace attn::inline ATTN_ISA {

enum class feature_rows {
  orthogonal,   // blocks of orthogonal rows with the lengths of normal vectors:
                // each row alone is N(0, 1), less variance
  equal_norms,  // blocks of orthogonal rows, all of length sqrt(dim)
  independent,  // normal numbers
};

struct draw_options {
  std::uint64_t seed = 0;
  feature_rows rows = feature_rows::orthogonal;
  /// 1: one matrix for all heads; else one a head.
  index heads = 1;
};

/// A matrix [heads, count, dim] that owns its memory; it is taken wherever a view of features is.
template <class T>
class random_features {
  static_assert(std::same_as<T, float> || std::same_as<T, double>);

 public:
  random_features(index heads, index count, index dim)
      : heads_(heads), count_(count), dim_(dim), memory_(static_cast<std::size_t>(heads * count * dim)) {}

  index heads() const { return heads_; }
  index count() const { return count_; }
  index dim() const { return dim_; }
  T* data() { return memory_.data(); }
  const T* data() const { return memory_.data(); }
  tensor_view<T, 3> view() { return {memory_.data(), {heads_, count_, dim_}}; }
  tensor_view<const T, 3> view() const { return {memory_.data(), {heads_, count_, dim_}}; }
  operator tensor_view<const T, 3>() const { return view(); }

 private:
  index heads_, count_, dim_;
  std::vector<T> memory_;
};

namespace detail {

/// Products and sums rounded once, the same with every compiler.
inline double exact_dot(const double* a, const double* b, index n) {
  double sum = 0;
  for (index i = 0; i < n; ++i) sum = std::fma(a[i], b[i], sum);
  return sum;
}

/// Makes rows [count, dim] orthonormal, count <= dim. Gram and Schmidt, each row twice; lengths are taken positive, so
/// that normal rows become uniformly distributed ones (the Q of a QR decomposition whose R has a positive diagonal).
inline void make_orthonormal(double* rows, index count, index dim) {
  for (index i = 0; i < count; ++i) {
    double* const row = rows + i * dim;
    for (int time = 0; time < 2; ++time)
      for (index j = 0; j < i; ++j) {
        const double along = -exact_dot(row, rows + j * dim, dim);
        for (index d = 0; d < dim; ++d) row[d] = std::fma(along, rows[j * dim + d], row[d]);
      }
    const double length = std::sqrt(exact_dot(row, row, dim));
    for (index d = 0; d < dim; ++d) row[d] /= length;
  }
}

/// `count` rows of one head.
inline void draw_rows(random_numbers& numbers, feature_rows kind, index count, index dim, double* rows) {
  const auto normal = [&](double* row) {
    for (index d = 0; d < dim; ++d) row[d] = numbers.normal();
  };
  for (index i = 0; i < count; ++i) normal(rows + i * dim);
  if (kind == feature_rows::independent) return;
  std::vector<double> other(static_cast<std::size_t>(dim));
  for (index first = 0; first < count; first += dim)
    make_orthonormal(rows + first * dim, std::min(dim, count - first), dim);
  for (index i = 0; i < count; ++i) {
    double length = std::sqrt(static_cast<double>(dim));
    if (kind == feature_rows::orthogonal) {  // that of a fresh normal vector,
                                             // independent of the direction
      normal(other.data());
      length = std::sqrt(exact_dot(other.data(), other.data(), dim));
    }
    for (index d = 0; d < dim; ++d) rows[i * dim + d] *= length;
  }
}

}  // namespace detail

/// Draws `count` features for heads of size `dim`. Cost O(heads count dim^2); done once, not in every call. Throws
/// std::invalid_argument unless count, dim and heads are at least 1.
template <class T>
random_features<T> draw_features(index count, index dim, const draw_options& options = {}) {
  const detail::validator check("draw_features");
  check.at_least("count", 1, count);
  check.at_least("dim", 1, dim);
  check.at_least("heads", 1, options.heads);
  check.fits("features", {options.heads, count, dim});
  random_features<T> features(options.heads, count, dim);
  std::vector<double> rows(static_cast<std::size_t>(count * dim));
  for (index h = 0; h < options.heads; ++h) {
    random_numbers numbers(options.seed, static_cast<std::uint64_t>(h));
    detail::draw_rows(numbers, options.rows, count, dim, rows.data());
    for (index n = 0; n < count * dim; ++n)
      features.data()[h * count * dim + n] = static_cast<T>(rows[static_cast<std::size_t>(n)]);
  }
  return features;
}
}  // namespace attn
