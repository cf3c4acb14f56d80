#pragma once
// What the gradients of the recurrences with a final state share: rounded(problem), case_of(problem) and gradients_by
// are each one's own.
#include "support/gradient.hpp"

namespace testing {

template <class S, class Problem>
void check_backward_with_state(const Problem& problem) {
  const Problem p = rounded<S>(problem);
  check_gradients(
      case_of(p), gradient_tolerance<S>::value,
      [&](const tensors&, const tensors& d_results) { return gradients_by<S>(p, d_results); },
      [](tensors& d) { d = {rounded<S>(d[0]), rounded<real<S>>(d[1])}; });
}

template <class Problem>
tensors random_d_results(const Problem& p) {
  const auto &v = p.x.v, &k = p.x.k;
  return {random_normal(98, v.batch(), v.heads(), v.length(), v.dim()),
          random_normal(99, v.batch(), v.heads(), k.dim(), v.dim())};
}

}  // namespace testing
