#include "golden/operators.hpp"
#include "support/call_kernel.hpp"

namespace testing {
namespace {

performer_problem read(const golden_case& golden) {
  performer_problem p{golden.array("q"), golden.array("k"), golden.array("v"), {}};
  p.options.causal = golden.flag("causal", false);
  p.options.lengths = golden.integers("lengths");
  p.options.query_lengths = golden.integers("query_lengths");
  p.options.key_lengths = golden.integers("key_lengths");
  p.options.features = golden.array("features");
  if (golden.has("scale")) p.options.scale = golden.number("scale");
  if (golden.has("eps")) p.options.eps = golden.number("eps");
  if (golden.has("feature_eps")) p.options.feature_eps = golden.number("feature_eps");
  const std::string kernel = golden.has("kernel") ? golden.text("kernel") : "positive";
  const char* names[] = {"positive", "hyperbolic", "trigonometric", "relu"};
  const auto found = std::find(std::begin(names), std::end(names), kernel);
  if (found == std::end(names)) throw std::runtime_error("unknown kernel " + kernel);
  p.options.kernel = static_cast<reference::performer_kernel>(found - std::begin(names));
  return p;
}

}  // namespace

golden_operator golden_performer() {
  return {"performer",
          {"operator", "source", "tolerance", "causal", "scale", "lengths", "query_lengths", "key_lengths", "kernel",
           "eps", "feature_eps"},
          {"q", "k", "v", "out", "features"},
          [](const golden_case& golden) { return expected(read(golden)); },
          [](const golden_case& golden) { return run_serially<double>(read(golden)); },
          [](const golden_case& golden) { return run_serially<float>(read(golden)); }};
}

}  // namespace testing
