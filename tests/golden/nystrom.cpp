#include "golden/operators.hpp"
#include "support/call_low_rank.hpp"

namespace testing {
namespace {

nystrom_problem read(const golden_case& golden) {
  nystrom_problem p{golden.array("q"), golden.array("k"), golden.array("v"), {}};
  read_softmax_options(golden, p.options);
  require_not_causal(golden);
  p.options.landmarks = golden.integer("landmarks");
  if (golden.has("iterations")) p.options.iterations = golden.integer("iterations");
  const std::string inverse = golden.has("pinv") ? golden.text("pinv") : "per_head";
  if (inverse == "exact")
    p.options.inverse = reference::pinv::exact;
  else if (inverse == "whole_batch")
    p.options.inverse = reference::pinv::whole_batch;
  else if (inverse != "per_head")
    throw std::runtime_error(golden.name() + ": pinv is " + inverse);
  p.options.cutoff = 0;  // the originals keep what is not rounding
  p.options.convolution = golden.optional_array("conv");
  return p;
}

}  // namespace

golden_operator golden_nystrom() {
  return {"nystrom",
          {"operator", "source", "tolerance", "causal", "scale", "lengths", "query_lengths", "key_lengths", "landmarks",
           "iterations", "pinv"},
          {"q", "k", "v", "conv", "out"},
          [](const golden_case& golden) { return expected(read(golden)); },
          [](const golden_case& golden) { return run<double>(read(golden)); },
          [](const golden_case& golden) { return run<float>(read(golden)); }};
}

}  // namespace testing
