#include "golden/operators.hpp"
#include "support/call_aft.hpp"

namespace testing {
namespace {

problem<reference::aft_conv_options> read(const golden_case& golden) {
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

}  // namespace

golden_operator golden_aft_conv() {
  return {"aft_conv",
          with(aft_keys, {"grid"}),
          with(aft_arrays, {"w"}),
          [](const golden_case& golden) -> reference::result {
            return {expected(read(golden)), {}};
          },
          [](const golden_case& golden) -> reference::result {
            attn::execution serial;
            return {run_aft<double>(read(golden), serial), {}};
          },
          [](const golden_case& golden) -> reference::result {
            attn::execution serial;
            return {run_aft<float>(read(golden), serial), {}};
          }};
}

}  // namespace testing
