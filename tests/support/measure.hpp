#pragma once
// How far a result is from what was expected.
#include <cmath>
#include <limits>

#include "support/tensor.hpp"

namespace testing {

// ‖actual − expected‖ / ‖expected‖ (Frobenius; absolute where ‖expected‖ is 0).
// Infinities must match exactly; a NaN, a misplaced infinity or another shape gives infinity.
template <class A, class E>
double relative_error(const tensor<A>& actual, const tensor<E>& expected) {
  constexpr double wrong = std::numeric_limits<double>::infinity();
  if (actual.extents != expected.extents) return wrong;
  double difference = 0, norm = 0;
  for (std::size_t n = 0; n < actual.data.size(); ++n) {
    const double a = static_cast<double>(actual.data[n]);
    const double e = static_cast<double>(expected.data[n]);
    if (std::isinf(e) && a == e) continue;
    if (!std::isfinite(a) || !std::isfinite(e)) return wrong;
    difference += (a - e) * (a - e);
    norm += e * e;
  }
  return norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference);
}

template <class T>
bool all_finite(const tensor<T>& x) {
  for (const T& value : x.data)
    if (!std::isfinite(static_cast<double>(value))) return false;
  return true;
}

// What an operator may differ from its reference, run on the same rounded inputs, on unit-normal
// input up to length 4096. float, double: the bounds the library promises.
template <class T>
struct tolerance;
template <>
struct tolerance<float> {
  static constexpr double out = 2e-6, lse = 2e-6;
};
template <>
struct tolerance<double> {
  static constexpr double out = 1e-13, lse = 1e-13;
};

}  // namespace testing
