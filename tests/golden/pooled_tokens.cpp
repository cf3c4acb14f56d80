#include "layers/pooled_tokens.hpp"

#include "golden/gradients.hpp"

namespace testing::pooled_tokens_golden {
namespace {

pooled_tokens_problem read(const golden_case& golden) {
  pooled_tokens_problem p{golden.array("x"), golden.optional_array("logits"), golden.optional_array("bias"), {}};
  p.options.window = golden.integer("window"), p.options.overlap = golden.flag("overlap", false);
  p.options.lengths = golden.integers("lengths");
  return p;
}

template <class S>
reference::result by_library(const golden_case& golden) {
  pooled_tokens_memory<S> m(read(golden));
  attn::execution serial;
  m.run(serial);
  return {cast<double>(m.out), {}};
}

const golden_operator entry_of{
    .name = "pooled_tokens",
    .keys = {"operator", "source", "tolerance", "window", "overlap", "lengths"},
    .arrays = {"x", "logits", "bias", "out"},
    .by_reference = [](const golden_case& golden) -> reference::result { return {read(golden).by_reference(), {}}; },
    .in_double = by_library<widest_type>,
    .in_float = by_library<float>};

const golden_entry entry(with_gradients(
    entry_of, read, [](const pooled_tokens_problem& p) { return case_of(p); },
    [](const pooled_tokens_problem& p, const tensor<double>& d_out, auto zero) {
      using S = decltype(zero);
      return written_gradients<S>(case_of(p), [&](const auto& in, const auto& to) {
        attn::execution serial;
        pooled_tokens_gradients_of<S>(p, in, cast<S>(d_out), to, false, serial);
      });
    }));

}  // namespace
}  // namespace testing::pooled_tokens_golden
