#include "golden/kernel.hpp"
#include "support/linear_decay.hpp"

namespace testing::linear_golden {
namespace {

reference::linear_feature read_feature(const golden_case& golden) {
  const std::string feature = golden.has("feature") ? golden.text("feature") : "elu_plus_one";
  if (feature == "elu_plus_one") return reference::linear_feature::elu_plus_one;
  if (feature == "relu") return reference::linear_feature::relu;
  if (feature == "identity") return reference::linear_feature::identity;
  throw std::runtime_error("unknown feature " + feature);
}

linear_decay_problem read_linear(const golden_case& golden) {
  linear_decay_problem p;
  p.x.q = golden.array("q"), p.x.k = golden.array("k"), p.x.v = golden.array("v");
  p.options.eps = 1e-6;
  read_kernel_options(golden, p.options);
  p.options.normalise = golden.flag("normalise", true);
  p.options.feature = read_feature(golden);
  if (golden.has("scale")) p.options.scale = golden.number("scale");
  if (golden.has_array("decay")) p.x.decay = golden.row_array("decay");
  p.x.log_decay = golden.optional_rows_or_array("log_decay");
  p.x.bonus = golden.optional_array("bonus");
  if (!p.x.bonus.empty()) p.x.bonus.extents = {1, p.x.q.heads(), 1, p.x.q.dim()};
  p.x.initial_state = golden.optional_array("initial_state");
  p.options.key_mask = golden.key_mask();
  return p;
}

// The gradients of the results the case differentiates.
tensors d_results(const golden_case& golden) {
  return {golden.array("d_out"), golden.optional_array("d_final_state")};
}

reference::result by_reference(const golden_case& golden) {
  const linear_decay_problem p = read_linear(golden);
  auto r = reference::linear(p.x, p.options);
  return {std::move(r.out), {}, std::move(r.final_state)};
}
template <class S>
reference::result by_library(const golden_case& golden) {
  linear_decay_result r = run_serially<S>(read_linear(golden));
  return {std::move(r.out), {}, std::move(r.final_state)};
}

named_tensors gradients_by_reference(const golden_case& golden) {
  const gradient_case c = case_of(read_linear(golden));
  const auto inputs = independent(c.inputs);
  const auto results = c.forward(inputs);
  const tensors d = d_results(golden);
  std::vector<reference::reverse_pass::result> ends{{results[0], d[0]}};
  if (!d[1].empty()) ends.push_back({results[1], d[1]});
  const reference::reverse_pass back(ends);
  named_tensors all;
  for (std::size_t n = 0; n < inputs.size(); ++n) all[c.names[n]] = back.gradient(inputs[n]);
  return all;
}
template <class S>
named_tensors gradients_by_library(const golden_case& golden) {
  const tensors all = decay_gradients_by<S>(read_linear(golden), d_results(golden));
  named_tensors named;
  for (std::size_t n = 0; n < all.size(); ++n) named[linear_decay_names[n]] = all[n];
  return named;
}

golden_operator golden_linear() {
  golden_operator entry{"linear",
                        with(kernel_keys, {"feature", "normalise", "scale"}),
                        {"q", "k", "v", "out", "decay", "log_decay", "bonus", "initial_state", "final_state",
                         "key_mask"},
                        by_reference,
                        by_library<widest_type>,
                        by_library<float>};
  entry.gradients_by_reference = gradients_by_reference;
  entry.gradients_in_double = gradients_by_library<widest_type>;
  entry.gradients_in_float = gradients_by_library<float>;
  return entry;
}

const golden_entry entry(golden_linear());

}  // namespace
}  // namespace testing::linear_golden
