#include "golden/aft.hpp"

namespace testing::aft_simple_golden {
namespace {

problem<reference::aft_simple_options> read_aft_simple(const golden_case& golden) {
  problem<reference::aft_simple_options> p{golden.array("q"), golden.array("k"), golden.array("v"), {}};
  read_aft_options(golden, p.options);
  return p;
}

golden_operator golden_aft_simple() { return aft_entry("aft_simple", {}, {}, read_aft_simple); }

const golden_entry entry(golden_aft_simple());

}  // namespace
}  // namespace testing::aft_simple_golden
