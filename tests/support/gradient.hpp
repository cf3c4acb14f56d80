#pragma once
// Gradients are tested against the reverse pass of the references (reference/variable.hpp), and that against central
// differences of the references.
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "reference/variable.hpp"
#include "support/catch.hpp"
#include "support/measure.hpp"
#include "support/random.hpp"

namespace testing {

using reference::tensor;
using reference::variable;

using tensors = std::vector<tensor<double>>;
using named_tensors = std::map<std::string, tensor<double>>;

// One case. What is differentiated, in order: q, k, v, parameters, each as a tensor ([1, 1, 1, n] for a list).
struct gradient_case {
  std::string name;
  std::vector<std::string> names;  // of the inputs
  tensors inputs;
  // The reference: its results (out; out and lse; ...) from the inputs.
  std::function<std::vector<tensor<variable>>(const std::vector<tensor<variable>>&)> forward;
};

// The library: gradients, in the order of the inputs, from the inputs and the gradients of the results.
using library_backward = std::function<tensors(const tensors& inputs, const tensors& d_results)>;

inline std::vector<tensor<variable>> independent(const tensors& inputs) {
  variable::forget();
  std::vector<tensor<variable>> all;
  for (const auto& x : inputs) all.push_back(reference::independent(x));
  return all;
}

// Random gradients of the results; 0 where a result is not finite.
inline tensors random_gradients(const std::vector<tensor<variable>>& results, std::uint64_t seed = 77) {
  tensors all;
  for (const auto& x : results) {
    all.push_back(random_normal(seed++, x.batch(), x.heads(), x.length(), x.dim()));
    for (std::size_t n = 0; n < x.data.size(); ++n)
      if (!isfinite(x.data[n])) all.back().data[n] = 0;
  }
  return all;
}

struct reference_gradients {
  tensors d_results, gradients;
};

// round(x) is what the library's element type makes of the gradients of the results.
inline reference_gradients gradients_of(const gradient_case& c, const std::function<void(tensors&)>& round = {}) {
  const auto inputs = independent(c.inputs);
  const auto results = c.forward(inputs);
  reference_gradients g{random_gradients(results), {}};
  if (round) round(g.d_results);
  std::vector<reference::reverse_pass::result> ends;
  for (std::size_t n = 0; n < results.size(); ++n) ends.push_back({results[n], g.d_results[n]});
  const reference::reverse_pass back(ends);
  for (const auto& x : inputs) g.gradients.push_back(back.gradient(x));
  return g;
}

// Every gradient of the library, relative to the reverse pass of the reference.
inline void check_gradients(const gradient_case& c, double tolerance, const library_backward& library,
                            const std::function<void(tensors&)>& round = {}) {
  INFO(c.name);
  const reference_gradients wanted = gradients_of(c, round);
  const tensors actual = library(c.inputs, wanted.d_results);
  REQUIRE(actual.size() == c.inputs.size());
  for (std::size_t n = 0; n < actual.size(); ++n) {
    INFO("gradient of " << c.names[n]);
    CHECK(relative_error(actual[n], wanted.gradients[n]) <= tolerance);
  }
}

// The reverse pass of the reference along a random direction t of each input in turn: <gradient, t> against the central
// difference of <d_results, forward(inputs)>. Its error is of order step^2 and 1e-16 / step.
inline void check_central_differences(const gradient_case& c, double tolerance = 1e-6) {
  INFO(c.name);
  const reference_gradients g = gradients_of(c);
  const auto objective = [&](const tensors& inputs) {
    const auto results = c.forward(independent(inputs));
    double sum = 0;
    for (std::size_t n = 0; n < results.size(); ++n)
      for (std::size_t e = 0; e < results[n].data.size(); ++e)
        if (g.d_results[n].data[e] != 0) sum += g.d_results[n].data[e] * results[n].data[e].value();
    return sum;
  };
  for (std::size_t n = 0; n < c.inputs.size(); ++n) {
    INFO("gradient of " << c.names[n]);
    const auto& x = c.inputs[n];
    if (x.empty()) continue;
    const tensor<double> t = random_normal(5 + n, x.batch(), x.heads(), x.length(), x.dim());
    constexpr double step = 1e-5;
    const auto moved = [&](double by) {
      tensors inputs = c.inputs;
      for (std::size_t e = 0; e < t.data.size(); ++e) inputs[n].data[e] += by * t.data[e];
      return objective(inputs);
    };
    double directional = 0, size = 0;
    for (std::size_t e = 0; e < t.data.size(); ++e) {
      directional += g.gradients[n].data[e] * t.data[e];
      size += g.gradients[n].data[e] * g.gradients[n].data[e];
    }
    CHECK(std::abs((moved(step) - moved(-step)) / (2 * step) - directional) <= tolerance * (1 + std::sqrt(size)));
  }
}

}  // namespace testing
