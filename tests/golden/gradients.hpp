#pragma once
// The golden gradients of the softmax family: what a case's problem gives by its reference and by the library.
#include "golden/operators.hpp"
#include "support/run_backward.hpp"

namespace testing {

// By the reverse pass of the reference.
inline named_tensors reverse_gradients(const gradient_case& c, const tensor<double>& d_out) {
  const auto inputs = independent(c.inputs);
  const auto results = c.forward(inputs);
  const reference::reverse_pass back({{results[0], d_out}});
  named_tensors all;
  for (std::size_t n = 0; n < inputs.size(); ++n) all[c.names[n]] = back.gradient(inputs[n]);
  return all;
}

// read(case) gives the problem.
template <class Problem>
golden_gradients gradients_by_reference(Problem (*read)(const golden_case&)) {
  return [read](const golden_case& golden) {
    return reverse_gradients(case_of(read(golden), false), golden.array("d_out"));
  };
}
template <class T, class Problem>
golden_gradients gradients_by_library(Problem (*read)(const golden_case&)) {
  return [read](const golden_case& golden) {
    const Problem p = read(golden);
    return library_gradients<T>(p, case_of(p, false), {golden.array("d_out")});
  };
}

// The entry with its gradients.
template <class Problem>
golden_operator with_gradients(golden_operator entry, Problem (*read)(const golden_case&)) {
  entry.gradients_by_reference = gradients_by_reference(read);
  entry.gradients_in_double = gradients_by_library<double>(read);
  entry.gradients_in_float = gradients_by_library<float>(read);
  return entry;
}

}  // namespace testing
