#include "golden/kernel.hpp"

namespace testing::rfa_golden {
namespace {

rfa_problem read_rfa(const golden_case& golden) {
  rfa_problem p{golden.array("q"), golden.array("k"), golden.array("v"), {}};
  read_kernel_options(golden, p.options);
  p.options.features = golden.array("features");
  if (golden.has("norm_eps")) p.options.norm_eps = golden.number("norm_eps");
  if (golden.has_array("gate")) p.options.gate = golden.row_array("gate");
  return p;
}

golden_operator golden_rfa() { return kernel_entry("rfa", {"norm_eps"}, {"features", "gate"}, read_rfa); }

const golden_entry entry(golden_rfa());

}  // namespace
}  // namespace testing::rfa_golden
