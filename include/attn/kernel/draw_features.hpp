// attn: random features for performer and rfa, drawn or the caller's own.
//
//   auto features = attn::draw_features<float>(256, 64, {.seed = 7});     // 256 rows of dim 64, for all heads
//   attn::performer(q, k, v, out, features);
//
// One seed gives the same bits with every compiler, on every machine. A matrix of the caller serves as well: any view
// [H, Hkv or 1, count, dim], or an Eigen matrix [count, dim]. Features have the element type of q, k, v and out.
#pragma once

#include <attn/core/random.hpp>
#include <attn/core/tensor.hpp>

#include <vector>

namespace attn { inline namespace ATTN_ISA {

enum class feature_rows {
  orthogonal,   // blocks of orthogonal rows with the lengths of normal vectors: each alone is N(0, 1), less variance
  equal_norms,  // blocks of orthogonal rows, all of length sqrt(dim)
  independent,  // normal numbers
};

struct draw_options {
  std::uint64_t seed = 0;
  feature_rows rows = feature_rows::orthogonal;
  idx_t heads = 1;  // 1: one matrix for all heads; else one per head
};

namespace detail {

/// Products and sums rounded once, the same with every compiler.
inline double exact_dot(const double* a, const double* b, idx_t n) {
  double sum = 0;
  for (idx_t i = 0; i < n; ++i) sum = std::fma(a[i], b[i], sum);
  return sum;
}

/// Makes rows [count, dim] orthonormal, count <= dim. Gram-Schmidt, each row twice, with positive lengths, so that
/// normal rows become uniformly distributed ones (the Q of a QR decomposition whose R has a positive diagonal).
inline void make_orthonormal(double* rows, idx_t count, idx_t dim) {
  for (idx_t i = 0; i < count; ++i) {
    double* const row = rows + i * dim;
    for (int time = 0; time < 2; ++time)
      for (idx_t j = 0; j < i; ++j) {
        const double along = -exact_dot(row, rows + j * dim, dim);
        for (idx_t d = 0; d < dim; ++d) row[d] = std::fma(along, rows[j * dim + d], row[d]);
      }
    const double length = std::sqrt(exact_dot(row, row, dim));
    for (idx_t d = 0; d < dim; ++d) row[d] /= length;
  }
}

/// `count` rows of one head.
inline void draw_rows(random_numbers& numbers, feature_rows kind, idx_t count, idx_t dim, double* rows) {
  const auto normal = [&](double* row) {
    for (idx_t d = 0; d < dim; ++d) row[d] = numbers.normal();
  };
  for (idx_t i = 0; i < count; ++i) normal(rows + i * dim);
  if (kind == feature_rows::independent) return;
  std::vector<double> other(static_cast<std::size_t>(dim));
  for (idx_t first = 0; first < count; first += dim)
    make_orthonormal(rows + first * dim, (std::min)(dim, count - first), dim);
  for (idx_t i = 0; i < count; ++i) {
    double length = std::sqrt(static_cast<double>(dim));
    if (kind == feature_rows::orthogonal) {  // the length of another normal vector, independent of the direction
      normal(other.data());
      length = std::sqrt(exact_dot(other.data(), other.data(), dim));
    }
    for (idx_t d = 0; d < dim; ++d) rows[i * dim + d] *= length;
  }
}

/// The element nearest to x. A 16-bit element is rounded by way of float; so that this is not double rounding, the last
/// bit of the float records whether digits were cut off.
template <element S>
S nearest_element(double x) {
  if constexpr (std::same_as<S, float> || std::same_as<S, double>) return static_cast<S>(x);
  float cut = static_cast<float>(x);
  if (static_cast<double>(cut) != x) {
    if (std::abs(static_cast<double>(cut)) > std::abs(x)) cut = std::nextafter(cut, 0.0f);
    cut = std::bit_cast<float>(std::bit_cast<std::uint32_t>(cut) | 1u);
  }
  return static_cast<S>(cut);
}

}  // namespace detail

/// Draws `count` features for heads of size `dim`: [heads, count, dim], in double, rounded once. Cost O(heads count
/// dim^2); done once, not in every call. Throws std::invalid_argument unless count, dim and heads are at least 1.
template <element S>
tensor<S, 3> draw_features(idx_t count, idx_t dim, const draw_options& options = {}) {
  const detail::validator check{"draw_features"};
  check.at_least("count", 1, count);
  check.at_least("dim", 1, dim);
  check.at_least("heads", 1, options.heads);
  check.fits("features", {options.heads, count, dim});
  tensor<S, 3> features({options.heads, count, dim});
  std::vector<double> rows(static_cast<std::size_t>(count * dim));
  S* to = features.data();
  for (idx_t h = 0; h < options.heads; ++h) {
    random_numbers numbers(options.seed, static_cast<std::uint64_t>(h));
    detail::draw_rows(numbers, options.rows, count, dim, rows.data());
    for (double x : rows) *to++ = detail::nearest_element<S>(x);
  }
  return features;
}

}}  // namespace attn::ATTN_ISA
