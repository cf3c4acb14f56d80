#include "golden/operators.hpp"
#include "support/call_kernel.hpp"

namespace testing {
namespace {

linear_problem read(const golden_case& golden) {
  linear_problem p{golden.array("q"), golden.array("k"), golden.array("v"), {}};
  p.options.causal = golden.flag("causal", false);
  p.options.lengths = golden.integers("lengths");
  p.options.query_lengths = golden.integers("query_lengths");
  p.options.key_lengths = golden.integers("key_lengths");
  p.options.eps = golden.has("eps") ? golden.number("eps") : 1e-6;
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
  return {"linear",
          {"operator", "source", "tolerance", "causal", "lengths", "query_lengths", "key_lengths", "feature", "eps",
           "normalise"},
          {"q", "k", "v", "out", "decay"},
          [](const golden_case& golden) { return expected(read(golden)); },
          [](const golden_case& golden) { return run_serially<double>(read(golden)); },
          [](const golden_case& golden) { return run_serially<float>(read(golden)); }};
}

}  // namespace testing
