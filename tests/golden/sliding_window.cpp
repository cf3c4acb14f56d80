#include "golden/gradients.hpp"

namespace testing::sliding_window_golden {
namespace {

static_assert(reference::unlimited == attn::unlimited);

idx_t reach(const golden_case& golden, const std::string& key, idx_t otherwise) {
  if (!golden.has(key)) return otherwise;
  return golden.integer(key) == -1 ? attn::unlimited : golden.integer(key);
}

sliding_window_problem read(const golden_case& golden) {
  sliding_window_problem p{golden.array("q"), golden.array("k"), golden.array("v"), {}};
  read_softmax_options(golden, p.options);
  p.options.left = reach(golden, "left", p.options.left);
  p.options.right = reach(golden, "right", p.options.right);
  p.options.dilation = golden.integers("dilation");
  p.options.global_positions = golden.integers("global_positions");
  p.options.q_global = golden.optional_array("q_global");
  p.options.k_global = golden.optional_array("k_global");
  p.options.v_global = golden.optional_array("v_global");
  return p;
}

golden_operator golden_sliding_window() {
  return with_gradients({"sliding_window", with(softmax_keys, {"left", "right", "dilation", "global_positions"}),
                         with(softmax_arrays, {"relative_bias", "relative_keys", "relative_queries", "log_decay", "q_global", "k_global", "v_global"}),
                         [](const golden_case& golden) { return expected(read(golden)); },
                         [](const golden_case& golden) { return run<widest_type>(read(golden)); },
                         [](const golden_case& golden) { return run<float>(read(golden)); }},
                        read);
}

const golden_entry entry(golden_sliding_window());

}  // namespace
}  // namespace testing::sliding_window_golden
