#include "support/run_pointwise.hpp"

#include "golden/gradients.hpp"

namespace testing::pointwise_golden {
namespace {

pointwise_problem read(const golden_case& golden) {
  pointwise_problem p{golden.array("q"), golden.array("k"), golden.array("v"), {}};
  read_softmax_options(golden, p.options);
  auto& o = p.options;
  const std::string f = golden.text("activation");
  if (f == "silu")
    o.kind = reference::pointwise_kind::silu;
  else if (f == "relu")
    o.kind = reference::pointwise_kind::relu;
  else if (f != "sigmoid")
    throw std::runtime_error(golden.name() + ": expected an activation of pointwise; found " + f);
  if (golden.has("left")) o.left = golden.integer("left");
  if (golden.has("right")) o.right = golden.integer("right");
  if (golden.has("weight")) o.weight = golden.number("weight");
  if (golden.has("shift")) o.shift = golden.number("shift");
  o.bias = golden.optional_array("bias");
  o.row_weights = golden.optional_array("row_weights");
  o.key_mask = golden.key_mask();
  return p;
}

golden_operator golden_pointwise() {
  return with_gradients(
      {"pointwise",
       {"operator", "source", "tolerance", "causal", "scale", "lengths", "query_lengths", "key_lengths", "activation",
        "left", "right", "weight", "shift"},
       {"q", "k", "v", "out", "alibi_slopes", "bias", "row_weights", "key_mask"},
       [](const golden_case& golden) { return expected(read(golden)); },
       [](const golden_case& golden) { return run<widest_type>(read(golden)); },
       [](const golden_case& golden) { return run<float>(read(golden)); }},
      read, [](const pointwise_problem& p) { return case_of(p); },
      [](const pointwise_problem& p, const tensor<double>& d_out, auto zero) {
        attn::execution serial;
        return library_gradients<decltype(zero)>(p, d_out, serial);
      });
}

const golden_entry entry(golden_pointwise());

}  // namespace
}  // namespace testing::pointwise_golden
