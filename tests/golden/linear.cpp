#include "golden/kernel.hpp"

namespace testing {
namespace {

linear_problem read_linear(const golden_case& golden) {
  linear_problem p{golden.array("q"), golden.array("k"), golden.array("v"), {}};
  p.options.eps = 1e-6;
  read_kernel_options(golden, p.options);
  p.options.normalise = golden.flag("normalise", true);
  if (golden.has_array("decay")) p.options.gate = golden.row_array("decay");
  const std::string feature = golden.has("feature") ? golden.text("feature") : "elu_plus_one";
  if (feature == "relu")
    p.options.feature = reference::linear_feature::relu;
  else if (feature == "identity")
    p.options.feature = reference::linear_feature::identity;
  else if (feature != "elu_plus_one")
    throw std::runtime_error("unknown feature " + feature);
  return p;
}

}  // namespace

golden_operator golden_linear() {
  return kernel_entry("linear", {"feature", "normalise"}, {"decay"}, read_linear, "decay");
}

}  // namespace testing
