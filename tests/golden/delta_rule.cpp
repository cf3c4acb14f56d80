#include "golden/gradients.hpp"
#include "support/gradient_delta_rule.hpp"

namespace testing::delta_rule_golden {
namespace {

delta_rule_problem read_delta_rule(const golden_case& golden) {
  delta_rule_problem p;
  p.x.q = golden.array("q"), p.x.k = golden.array("k"), p.x.v = golden.array("v");
  if (golden.has_array("beta")) p.x.beta = golden.row_array("beta");
  p.x.log_decay = golden.optional_rows_or_array("log_decay");
  p.x.initial_state = golden.optional_array("initial_state");
  if (golden.has("scale")) p.options.scale = golden.number("scale");
  if (golden.has("unit_norm_eps")) p.options.unit_norm_eps = golden.number("unit_norm_eps");
  p.options.lengths = golden.integers("lengths");
  p.options.key_mask = golden.key_mask();
  return p;
}

golden_operator golden_delta_rule() {
  return with_state_gradients(
      {"delta_rule",
       {"operator", "source", "tolerance", "scale", "lengths", "unit_norm_eps"},
       {"q", "k", "v", "out", "beta", "log_decay", "initial_state", "final_state", "key_mask"},
       [](const golden_case& golden) { return expected(read_delta_rule(golden)); },
       [](const golden_case& golden) { return run_serially<widest_type>(read_delta_rule(golden)); },
       [](const golden_case& golden) { return run_serially<float>(read_delta_rule(golden)); }},
      read_delta_rule, delta_rule_names);
}

const golden_entry entry(golden_delta_rule());

}  // namespace
}  // namespace testing::delta_rule_golden
