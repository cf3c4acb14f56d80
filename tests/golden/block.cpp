#include "golden/gradients.hpp"
#include "support/run_pattern_backward.hpp"

namespace testing::block_golden {
namespace {

problem<reference::block_options> read(const golden_case& golden) {
  problem<reference::block_options> p{golden.array("q"), golden.array("k"), golden.array("v"), {}};
  read_softmax_options(golden, p.options);
  p.options.size = golden.integer("block");
  if (golden.has("neighbours")) p.options.neighbours = golden.integer("neighbours");
  p.options.permutation = cast<idx_t>(golden.optional_array("permutation"));
  auto& e = p.options.permutation.extents;
  if (!p.options.permutation.empty()) e = {1, e[2], e[3], 1};  // [H, blocks]
  return p;
}

golden_operator golden_block() {
  return with_gradients({"block", with(softmax_keys, {"block", "neighbours"}), with(softmax_arrays, {"permutation"}),
                         [](const golden_case& golden) {
                           const auto p = read(golden);
                           return reference::block(p.q, p.k, p.v, p.options);
                         },
                         [](const golden_case& golden) { return run_pattern<widest_type>(read(golden)); },
                         [](const golden_case& golden) { return run_pattern<float>(read(golden)); }},
                        read);
}

const golden_entry entry(golden_block());

}  // namespace
}  // namespace testing::block_golden
