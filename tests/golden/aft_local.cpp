#include "golden/aft.hpp"

namespace testing::aft_local_golden {
namespace {

problem<reference::aft_local_options> read_aft_local(const golden_case& golden) {
  problem<reference::aft_local_options> p{golden.array("q"), golden.array("k"), golden.array("v"), {}};
  read_aft_options(golden, p.options);
  p.options.window = golden.integer("window");
  p.options.band = golden.has_array("band");
  p.options.w = golden.array(p.options.band ? "band" : "w");
  return p;
}

golden_operator golden_aft_local() { return aft_entry("aft_local", {"window"}, {"w", "band"}, read_aft_local); }

const golden_entry entry(golden_aft_local());

}  // namespace
}  // namespace testing::aft_local_golden
