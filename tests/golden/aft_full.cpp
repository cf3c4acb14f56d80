#include "golden/aft.hpp"

namespace testing::aft_full_golden {
namespace {

problem<reference::aft_full_options> read_aft_full(const golden_case& golden) {
  problem<reference::aft_full_options> p{golden.array("q"), golden.array("k"), golden.array("v"), {}};
  read_aft_options(golden, p.options);
  p.options.w = golden.array("w");
  return p;
}

golden_operator golden_aft_full() { return aft_entry("aft_full", {}, {"w"}, read_aft_full); }

const golden_entry entry(golden_aft_full());

}  // namespace
}  // namespace testing::aft_full_golden
