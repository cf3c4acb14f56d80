#include "golden/gradients.hpp"
#include "support/run_pattern_backward.hpp"
#include "support/run_selected_keys.hpp"

namespace testing::selected_keys_golden {
namespace {

selected_problem read(const golden_case& golden) {
  selected_problem p{golden.array("q"), golden.array("k"), golden.array("v"), {}};
  read_softmax_options(golden, p.options);
  if (golden.has("block")) p.options.block = golden.integer("block");
  p.options.indices = cast<idx_t>(golden.array("indices"));
  return p;
}

golden_operator golden_selected_keys() {
  return with_gradients({"selected_keys", with(softmax_keys, {"block", "span", "first_position"}), with(softmax_arrays, {"indices"}),
                         [](const golden_case& golden) { return expected(read(golden)); },
                         [](const golden_case& golden) { return run_pattern<widest_type>(read(golden)); },
                         [](const golden_case& golden) { return run_pattern<float>(read(golden)); }},
                        read);
}

const golden_entry entry(golden_selected_keys());

}  // namespace
}  // namespace testing::selected_keys_golden
