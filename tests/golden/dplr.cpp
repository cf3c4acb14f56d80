#include "golden/gradients.hpp"
#include "support/gradient_dplr.hpp"

namespace testing::dplr_golden {
namespace {

dplr_problem read_dplr(const golden_case& golden) {
  dplr_problem p;
  p.x.q = golden.array("q"), p.x.k = golden.array("k"), p.x.v = golden.array("v");
  p.x.a = golden.array("a"), p.x.b = golden.array("b");
  p.x.log_decay = golden.optional_rows_or_array("log_decay");
  p.x.initial_state = golden.optional_array("initial_state");
  if (golden.has("scale")) p.options.scale = golden.number("scale");
  p.options.lengths = golden.integers("lengths");
  p.options.key_mask = golden.key_mask();
  return p;
}

golden_operator golden_dplr() {
  return with_state_gradients(
      {"dplr",
       {"operator", "source", "tolerance", "scale", "lengths"},
       {"q", "k", "v", "out", "a", "b", "log_decay", "initial_state", "final_state", "key_mask"},
       [](const golden_case& golden) { return expected(read_dplr(golden)); },
       [](const golden_case& golden) { return run_serially<widest_type>(read_dplr(golden)); },
       [](const golden_case& golden) { return run_serially<float>(read_dplr(golden)); }},
      read_dplr, dplr_names);
}

const golden_entry entry(golden_dplr());

}  // namespace
}  // namespace testing::dplr_golden
