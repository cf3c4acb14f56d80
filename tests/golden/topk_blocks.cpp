#include "golden/gradients.hpp"
#include "support/run_pattern_backward.hpp"
#include "support/run_topk_blocks.hpp"

namespace testing::topk_blocks_golden {
namespace {

topk_problem read(const golden_case& golden) {
  topk_problem p{golden.array("q"), golden.array("k"), golden.array("v"), {}};
  read_softmax_options(golden, p.options);
  if (!golden.flag("causal", true)) throw std::runtime_error(golden.name() + ": topk_blocks is causal");
  p.options.block = golden.integer("block"), p.options.topk = golden.integer("topk");
  return p;
}

golden_operator golden_topk_blocks() {
  return with_gradients({"topk_blocks", with(softmax_keys, {"block", "topk"}), softmax_arrays,
                         [](const golden_case& golden) { return expected(read(golden)); },
                         [](const golden_case& golden) { return run_pattern<widest_type>(read(golden)); },
                         [](const golden_case& golden) { return run_pattern<float>(read(golden)); }},
                        read);
}

const golden_entry entry(golden_topk_blocks());

}  // namespace
}  // namespace testing::topk_blocks_golden
