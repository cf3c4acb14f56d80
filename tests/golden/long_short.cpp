#include "golden/operators.hpp"
#include "support/run_long_short.hpp"

namespace testing {
namespace {

long_short_problem read(const golden_case& golden) {
  long_short_problem p{golden.array("q"), golden.array("k"), golden.array("v"), {}};
  auto& o = p.options;
  read_softmax_options(golden, o);
  o.left = golden.integer("left"), o.right = golden.integer("right");
  if (golden.has("block")) o.block = golden.integer("block");
  if (golden.has("segment")) o.segment = golden.integer("segment");
  if (golden.has("norm_eps")) o.norm_eps = golden.number("norm_eps");
  o.logits = golden.array("logits");
  o.local_gamma = golden.vector("local_gamma"), o.local_beta = golden.vector("local_beta");
  o.global_gamma = golden.vector("global_gamma"), o.global_beta = golden.vector("global_beta");
  return p;
}

}  // namespace

golden_operator golden_long_short() {
  return {"long_short",
          with(softmax_keys, {"left", "right", "rank", "segment", "block", "norm_eps"}),
          with(softmax_arrays, {"logits", "local_gamma", "local_beta", "global_gamma", "global_beta"}),
          [](const golden_case& golden) {
            const long_short_problem p = read(golden);
            return reference::long_short(p.q, p.k, p.v, p.options);
          },
          [](const golden_case& golden) { return run_long_short<double>(read(golden)); },
          [](const golden_case& golden) { return run_long_short<float>(read(golden)); }};
}

}  // namespace testing
