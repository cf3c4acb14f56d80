#include "golden/gradients.hpp"
#include "support/run_pattern_backward.hpp"

namespace testing::strided_golden {
namespace {

problem<reference::strided_options> read(const golden_case& golden) {
  problem<reference::strided_options> p{golden.array("q"), golden.array("k"), golden.array("v"), {}};
  read_softmax_options(golden, p.options);
  p.options.fixed = golden.text("kind") == "fixed";
  p.options.stride = golden.integer("stride");
  if (golden.has("summary")) p.options.summary = golden.integer("summary");
  return p;
}

golden_operator golden_strided() {
  return with_gradients({"strided", with(softmax_keys, {"kind", "stride", "summary"}), softmax_arrays,
                         [](const golden_case& golden) {
                           const auto p = read(golden);
                           return reference::strided(p.q, p.k, p.v, p.options);
                         },
                         [](const golden_case& golden) { return run_pattern<widest_type>(read(golden)); },
                         [](const golden_case& golden) { return run_pattern<float>(read(golden)); }},
                        read);
}

const golden_entry entry(golden_strided());

}  // namespace
}  // namespace testing::strided_golden
