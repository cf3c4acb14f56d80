#include "golden/operators.hpp"
#include "support/call_aft.hpp"

namespace testing {
namespace {

problem<reference::aft_local_options> read(const golden_case& golden) {
  problem<reference::aft_local_options> p{golden.array("q"), golden.array("k"), golden.array("v"), {}};
  read_aft_options(golden, p.options);
  p.options.window = golden.integer("window");
  p.options.band = golden.has_array("band");
  p.options.w = golden.array(p.options.band ? "band" : "w");
  return p;
}

}  // namespace

golden_operator golden_aft_local() {
  return {"aft_local",
          with(aft_keys, {"window"}),
          with(aft_arrays, {"w", "band"}),
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
