#include "golden/gradients.hpp"
#include "support/run_neighborhood.hpp"
#include "support/run_pattern_backward.hpp"

namespace testing::neighborhood_golden {
namespace {

neighborhood_problem read(const golden_case& golden) {
  neighborhood_problem p{golden.array("q"), golden.array("k"), golden.array("v"), {}};
  read_softmax_options(golden, p.options);
  auto& o = p.options;
  o.grid = golden.integers("grid"), o.kernel = golden.integers("kernel"), o.stride = golden.integers("stride");
  o.dilation = golden.integers("dilation"), o.causal_axes = golden.integers("causal_axes");
  o.shift = golden.integers("shift");
  return p;
}

golden_operator golden_neighborhood() {
  return with_gradients(
      {"neighborhood",
       {"operator", "source", "tolerance", "scale", "softcap", "grid", "kernel", "stride", "dilation", "causal_axes",
        "shift"},
       with(softmax_arrays, {"relative_bias"}),
       [](const golden_case& golden) { return expected(read(golden)); },
       [](const golden_case& golden) { return run_pattern<widest_type>(read(golden)); },
       [](const golden_case& golden) { return run_pattern<float>(read(golden)); }},
      read);
}

const golden_entry entry(golden_neighborhood());

}  // namespace
}  // namespace testing::neighborhood_golden
