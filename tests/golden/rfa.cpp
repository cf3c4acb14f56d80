#include "golden/operators.hpp"
#include "support/call_kernel.hpp"

namespace testing {
namespace {

rfa_problem read(const golden_case& golden) {
  rfa_problem p{golden.array("q"), golden.array("k"), golden.array("v"), {}};
  p.options.causal = golden.flag("causal", false);
  p.options.lengths = golden.integers("lengths");
  p.options.query_lengths = golden.integers("query_lengths");
  p.options.key_lengths = golden.integers("key_lengths");
  p.options.features = golden.array("features");
  if (golden.has("eps")) p.options.eps = golden.number("eps");
  if (golden.has("norm_eps")) p.options.norm_eps = golden.number("norm_eps");
  if (golden.has_array("gate")) p.options.gate = golden.row_array("gate");
  return p;
}

}  // namespace

golden_operator golden_rfa() {
  return {"rfa",
          {"operator", "source", "tolerance", "causal", "lengths", "query_lengths", "key_lengths", "eps", "norm_eps"},
          {"q", "k", "v", "out", "features", "gate"},
          [](const golden_case& golden) { return expected(read(golden)); },
          [](const golden_case& golden) { return run_serially<double>(read(golden)); },
          [](const golden_case& golden) { return run_serially<float>(read(golden)); }};
}

}  // namespace testing
