#include "golden/operators.hpp"
#include "support/call_aft.hpp"

namespace testing {
namespace {

problem<reference::aft_full_options> read(const golden_case& golden) {
  problem<reference::aft_full_options> p{golden.array("q"), golden.array("k"), golden.array("v"), {}};
  read_aft_options(golden, p.options);
  p.options.w = golden.array("w");
  return p;
}

}  // namespace

golden_operator golden_aft_full() {
  return {"aft_full",
          with(aft_keys, {}),
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
