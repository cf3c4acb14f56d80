#include "golden/kernel.hpp"

namespace testing::performer_golden {
namespace {

performer_problem read_performer(const golden_case& golden) {
  performer_problem p{golden.array("q"), golden.array("k"), golden.array("v"), {}};
  read_kernel_options(golden, p.options);
  p.options.features = golden.array("features");
  if (golden.has("scale")) p.options.scale = golden.number("scale");
  if (golden.has("feature_eps")) p.options.feature_eps = golden.number("feature_eps");
  const std::string kernel = golden.has("kernel") ? golden.text("kernel") : "positive";
  const char* names[] = {"positive", "hyperbolic", "trigonometric", "relu"};
  const auto found = std::find(std::begin(names), std::end(names), kernel);
  if (found == std::end(names)) throw std::runtime_error("unknown kernel " + kernel);
  p.options.kernel = static_cast<reference::performer_kernel>(found - std::begin(names));
  return p;
}

golden_operator golden_performer() {
  return kernel_entry("performer", {"scale", "kernel", "feature_eps"}, {"features"}, read_performer);
}

const golden_entry entry(golden_performer());

}  // namespace
}  // namespace testing::performer_golden
