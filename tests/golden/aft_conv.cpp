#include "golden/aft.hpp"

namespace testing::aft_conv_golden {
namespace {

problem<reference::aft_conv_options> read_aft_conv(const golden_case& golden) {
  problem<reference::aft_conv_options> p{golden.array("q"), golden.array("k"), golden.array("v"), {}};
  read_aft_options(golden, p.options);
  p.options.w = golden.array("w");
  const auto grid = golden.integers("grid");
  if (grid.empty())  // [heads, width]
    p.options.w.extents = {1, p.options.w.length(), 1, p.options.w.dim()};
  else
    p.options.columns = grid.at(1);
  return p;
}

golden_operator golden_aft_conv() { return aft_entry("aft_conv", {"grid"}, {"w"}, read_aft_conv); }

const golden_entry entry(golden_aft_conv());

}  // namespace
}  // namespace testing::aft_conv_golden
