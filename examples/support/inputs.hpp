// Inputs, times and errors, for examples that compare.
#pragma once

#include <attn/core/tensor.hpp>

#include <Eigen/Core>

#include <chrono>
#include <random>

namespace support {

using floats = attn::tensor<float>;  // [batch, heads, tokens, dim]
using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;  // of one head

// Normal numbers, others with every call.
template <class Tensor = floats>
Tensor random(const typename Tensor::extents_type& extents) {
  static std::mt19937 source(1);
  std::normal_distribution<float> normal;
  Tensor x(extents);
  for (float* number = x.data(); number < x.data() + x.size(); ++number) *number = normal(source);
  return x;
}

// The numbers of a tensor, one after another.
inline Eigen::Map<Eigen::VectorXf> vector(floats& x) { return {x.data(), x.size()}; }
inline Eigen::Map<const Eigen::VectorXf> vector(const floats& x) { return {x.data(), x.size()}; }

inline double product(const floats& x, const floats& y) {
  return vector(x).cast<double>().dot(vector(y).cast<double>());
}
// |x - y| / |y|
inline double relative_error(const floats& x, const floats& y) {
  return (vector(x) - vector(y)).cast<double>().norm() / vector(y).cast<double>().norm();
}

template <class Call>
double milliseconds(Call&& call) {
  const auto begin = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace support
