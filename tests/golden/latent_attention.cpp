#include "layers/latent_attention.hpp"

#include "golden/gradients.hpp"

namespace testing::latent_attention_golden {
namespace {

latent_problem read(const golden_case& golden) {
  latent_problem p{golden.array("q"), golden.optional_array("q_rotary"), golden.array("latent"),
                   golden.optional_array("k_rotary"), golden.array("w_key"), golden.array("w_value"), {}};
  read_softmax_options(golden, p.options);
  return p;
}

// In both forms, which agree: the result is that of the worse one.
template <class S>
reference::result by_library(const golden_case& golden) {
  latent_problem p = read(golden);
  const reference::result wanted = p.by_reference();
  std::optional<reference::result> worst;
  for (auto form : {attn::latent_form::expanded, attn::latent_form::absorbed}) {
    p.form = form;
    latent_memory<S> m(p);
    attn::execution serial;
    m.run(serial);
    const reference::result one{cast<double>(m.out), cast<double>(m.lse)};
    if (!worst || relative_error(one.out, wanted.out) > relative_error(worst->out, wanted.out)) worst = one;
  }
  return *worst;
}

const golden_operator entry_of{
    .name = "latent_attention",
    .keys = softmax_keys,
    .arrays = with({"q", "q_rotary", "latent", "k_rotary", "w_key", "w_value", "out", "lse"}, {"sinks"}),
    .by_reference = [](const golden_case& golden) { return read(golden).by_reference(); },
    .in_double = by_library<widest_type>,
    .in_float = by_library<float>};

const golden_entry entry(with_gradients(
    entry_of, read, [](const latent_problem& p) { return case_of(p); },
    [](const latent_problem& p, const tensor<double>& d_out, auto zero) {
      using S = decltype(zero);
      return written_gradients<S>(case_of(p), [&](const auto& in, const auto& to) {
        attn::execution serial;
        latent_gradients_of<S>(p, in, cast<S>(d_out), to, false, serial);
      });
    }));

}  // namespace
}  // namespace testing::latent_attention_golden
