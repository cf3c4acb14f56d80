#include "golden/gradients.hpp"
#include "support/run_pattern_backward.hpp"

namespace testing::bigbird_golden {
namespace {

problem<reference::bigbird_options> read(const golden_case& golden) {
  problem<reference::bigbird_options> p{golden.array("q"), golden.array("k"), golden.array("v"), {}};
  read_softmax_options(golden, p.options);
  p.options.size = golden.integer("block");
  if (golden.has("global_blocks")) p.options.global_blocks = golden.integer("global_blocks");
  if (golden.has("window_blocks")) p.options.window_blocks = golden.integer("window_blocks");
  p.options.random = cast<idx_t>(golden.optional_array("random"));
  return p;
}

golden_operator golden_bigbird() {
  return with_gradients(
      {"bigbird", with(softmax_keys, {"block", "global_blocks", "window_blocks"}), with(softmax_arrays, {"random"}),
       [](const golden_case& golden) {
         const auto p = read(golden);
         return reference::bigbird(p.q, p.k, p.v, p.options);
       },
       [](const golden_case& golden) { return run_pattern<widest_type>(read(golden)); },
       [](const golden_case& golden) { return run_pattern<float>(read(golden)); }},
      read);
}

const golden_entry entry(golden_bigbird());

}  // namespace
}  // namespace testing::bigbird_golden
