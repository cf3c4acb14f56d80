#include "golden/gradients.hpp"

namespace testing::full_softmax_golden {
namespace {

full_softmax_problem read(const golden_case& golden) {
  full_softmax_problem p{golden.array("q"), golden.array("k"), golden.array("v"), {}};
  read_softmax_options(golden, p.options);
  p.options.bias = golden.optional_array("bias");
  return p;
}

golden_operator golden_full_softmax() {
  return with_gradients({"full_softmax", softmax_keys, with(softmax_arrays, {"relative_bias", "relative_keys", "relative_queries", "log_decay", "bias"}),
                         [](const golden_case& golden) { return expected(read(golden)); },
                         [](const golden_case& golden) { return run<widest_type>(read(golden)); },
                         [](const golden_case& golden) { return run<float>(read(golden)); }},
                        read);
}

const golden_entry entry(golden_full_softmax());

}  // namespace
}  // namespace testing::full_softmax_golden
