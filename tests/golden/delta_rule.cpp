#include "golden/gradients.hpp"
#include "support/gradient_delta_rule.hpp"

namespace testing::delta_rule_golden {
namespace {

delta_rule_problem read_delta_rule(const golden_case& golden) {
  delta_rule_problem p;
  p.x.q = golden.array("q"), p.x.k = golden.array("k"), p.x.v = golden.array("v");
  if (golden.has_array("beta")) p.x.beta = golden.row_array("beta");
  p.x.log_decay = golden.optional_rows_or_array("log_decay");
  p.x.initial_state = golden.optional_array("initial_state");
  if (golden.has("scale")) p.options.scale = golden.number("scale");
  if (golden.has("unit_norm_eps")) p.options.unit_norm_eps = golden.number("unit_norm_eps");
  p.options.lengths = golden.integers("lengths");
  p.options.key_mask = golden.key_mask();
  return p;
}

// The gradients of the results the case differentiates.
tensors d_results(const golden_case& golden) {
  return {golden.array("d_out"), golden.optional_array("d_final_state")};
}

template <class S>
named_tensors by_library(const golden_case& golden) {
  const delta_rule_problem p = read_delta_rule(golden);
  const tensors all = gradients_by<S>(p, d_results(golden));
  named_tensors named;
  for (std::size_t n = 0; n < all.size(); ++n) named[delta_rule_names[n]] = all[n];
  return named;
}

named_tensors by_reference(const golden_case& golden) {
  const gradient_case c = case_of(read_delta_rule(golden));
  const auto inputs = independent(c.inputs);
  const auto results = c.forward(inputs);
  const tensors d = d_results(golden);
  std::vector<reference::reverse_pass::result> ends{{results[0], d[0]}};
  if (given(d[1])) ends.push_back({results[1], d[1]});
  const reference::reverse_pass back(ends);
  named_tensors all;
  for (std::size_t n = 0; n < inputs.size(); ++n) all[c.names[n]] = back.gradient(inputs[n]);
  return all;
}

golden_operator golden_delta_rule() {
  golden_operator entry{
      "delta_rule",
      {"operator", "source", "tolerance", "scale", "lengths", "unit_norm_eps"},
      {"q", "k", "v", "out", "beta", "log_decay", "initial_state", "final_state", "key_mask"},
      [](const golden_case& golden) { return expected(read_delta_rule(golden)); },
      [](const golden_case& golden) { return run_serially<widest_type>(read_delta_rule(golden)); },
      [](const golden_case& golden) { return run_serially<float>(read_delta_rule(golden)); }};
  entry.gradients_by_reference = by_reference;
  entry.gradients_in_double = by_library<widest_type>;
  entry.gradients_in_float = by_library<float>;
  return entry;
}

const golden_entry entry(golden_delta_rule());

}  // namespace
}  // namespace testing::delta_rule_golden
