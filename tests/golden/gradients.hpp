#pragma once
// The golden gradients: what a case's problem gives by its reference and by the library.
#include "golden/operators.hpp"
#include "support/run_backward.hpp"

namespace testing {

// Cases of layers hold sequences as [B, L, C], which is read as [1, B, L, C].
inline tensor<double> by_item(tensor<double> x) {
  if (!x.empty()) x.extents = {x.extents[1], 1, x.extents[2], x.extents[3]};
  return x;
}
inline tensor<double> as_read(tensor<double> x) {
  x.extents = {1, x.extents[0], x.extents[2], x.extents[3]};
  return x;
}

// By the reverse pass of the reference.
inline named_tensors reverse_gradients(const gradient_case& c, const tensor<double>& d_out) {
  const auto inputs = independent(c.inputs);
  const auto results = c.forward(inputs);
  const reference::reverse_pass back({{results[0], d_out}});
  named_tensors all;
  for (std::size_t n = 0; n < inputs.size(); ++n) all[c.names[n]] = back.gradient(inputs[n]);
  return all;
}

// The gradients of a case's inputs by the library in S, by their names: gradients(in) gives them in that order.
template <class S, class Gradients>
named_tensors named_gradients(const gradient_case& c, const Gradients& gradients) {
  std::vector<tensor<S>> in;
  for (const auto& x : c.inputs) in.push_back(cast<S>(x));
  const std::vector<tensor<S>> all = gradients(in);
  named_tensors named;
  for (std::size_t n = 0; n < all.size(); ++n) named[c.names[n]] = cast<double>(all[n]);
  return named;
}

// The same of a function that writes them: write(in, to).
template <class S, class Write>
named_tensors written_gradients(const gradient_case& c, const Write& write) {
  return named_gradients<S>(c, [&](const std::vector<tensor<S>>& in) {
    std::vector<tensor<S>> all = in;
    std::vector<tensor<S>*> to;
    for (auto& g : all) to.push_back(&g);
    write(in, to);
    return all;
  });
}

// The entry with its gradients: read(case) gives the problem, as_case(problem) the case of the reverse pass, and
// library(problem, d_out, T()) the library's gradients in T.
template <class Problem, class AsCase, class Library>
golden_operator with_gradients(golden_operator entry, Problem (*read)(const golden_case&), AsCase as_case,
                               Library library) {
  entry.gradients_by_reference = [=](const golden_case& golden) {
    return reverse_gradients(as_case(read(golden)), golden.array("d_out"));
  };
  entry.gradients_in_double = [=](const golden_case& golden) {
    return library(read(golden), golden.array("d_out"), widest_type());
  };
  entry.gradients_in_float = [=](const golden_case& golden) {
    return library(read(golden), golden.array("d_out"), float());
  };
  return entry;
}

// Of recurrences, whose cases may differentiate the final state too: gradients_by(problem, d_results) gives the
// gradients of `names`, in their order.
template <class Problem>
golden_operator with_state_gradients(golden_operator entry, Problem (*read)(const golden_case&),
                                     const std::vector<std::string>& names) {
  const auto d_results = [](const golden_case& golden) {
    return tensors{golden.array("d_out"), golden.optional_array("d_final_state")};
  };
  const auto by_library = [=](const golden_case& golden, auto zero) {
    const tensors all = gradients_by<decltype(zero)>(read(golden), d_results(golden));
    named_tensors named;
    for (std::size_t n = 0; n < all.size(); ++n) named[names[n]] = all[n];
    return named;
  };
  entry.gradients_by_reference = [=](const golden_case& golden) {
    const gradient_case c = case_of(read(golden));
    const auto inputs = independent(c.inputs);
    const auto results = c.forward(inputs);
    const tensors d = d_results(golden);
    std::vector<reference::reverse_pass::result> ends{{results[0], d[0]}};
    if (golden.has_array("d_final_state")) ends.push_back({results[1], d[1]});
    const reference::reverse_pass back(ends);
    named_tensors all;
    for (std::size_t n = 0; n < inputs.size(); ++n) all[c.names[n]] = back.gradient(inputs[n]);
    return all;
  };
  entry.gradients_in_double = [=](const golden_case& golden) { return by_library(golden, widest_type()); };
  entry.gradients_in_float = [=](const golden_case& golden) { return by_library(golden, float()); };
  return entry;
}

// Of the softmax family.
template <class Options>
golden_operator with_gradients(golden_operator entry, problem<Options> (*read)(const golden_case&)) {
  return with_gradients(
      std::move(entry), read, [](const problem<Options>& p) { return case_of(p, false); },
      [](const problem<Options>& p, const tensor<double>& d_out, auto zero) {
        return library_gradients<decltype(zero)>(p, case_of(p, false), {d_out});
      });
}

}  // namespace testing
