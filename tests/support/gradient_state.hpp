#pragma once
// What the gradients of the recurrences with a final state share: rounded(problem), case_of(problem) and gradients_by
// are each one's own.
#include <array>
#include <functional>

#include "support/catch.hpp"
#include "support/gradient.hpp"

namespace testing {

// Which gradients are asked for, and what is in their memory before.
template <std::size_t Count>
struct asked_gradients {
  std::array<bool, Count> of = [] {
    std::array<bool, Count> all;
    all.fill(true);
    return all;
  }();
  bool accumulate = false;
  double before = 7;
};

// Each gradient alone is what it is with the others, and is added once to what is there.
template <std::size_t Count>
void check_alone_and_added(const std::function<tensors(const asked_gradients<Count>&)>& by, const tensors& all,
                           const std::vector<std::string>& names, double tolerance) {
  const tensors added = by({.accumulate = true, .before = 0.5});
  for (std::size_t n = 0; n < Count; ++n) {
    INFO(names[n]);
    asked_gradients<Count> alone{.of = {}};
    alone.of[n] = true;
    CHECK(by(alone)[n] == all[n]);
    tensor<double> sum = all[n];
    for (double& x : sum.data) x += 0.5;
    CHECK(relative_error(added[n], sum) <= tolerance);
  }
}

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
