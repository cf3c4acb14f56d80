#include "golden/operators.hpp"
#include "support/call_low_rank.hpp"

namespace testing {
namespace {

linformer_problem read(const golden_case& golden) {
  linformer_problem p{golden.array("q"), golden.array("k"), golden.array("v"), {}};
  read_softmax_options(golden, p.options);
  require_not_causal(golden);
  p.options.e = golden.array("e");
  p.options.f = golden.has_array("f") ? golden.array("f") : p.options.e;
  return p;
}

}  // namespace

golden_operator golden_linformer() {
  return {"linformer",
          {"operator", "source", "tolerance", "causal", "scale", "lengths", "query_lengths", "key_lengths"},
          {"q", "k", "v", "e", "f", "out", "lse"},
          [](const golden_case& golden) { return expected(read(golden)); },
          [](const golden_case& golden) { return run<double>(read(golden)); },
          [](const golden_case& golden) { return run<float>(read(golden)); }};
}

}  // namespace testing
