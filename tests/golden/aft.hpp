#pragma once
// What the entries of the attention-free family share.
#include "aft/gradients.hpp"
#include "golden/gradients.hpp"

namespace testing {

inline void read_aft_options(const golden_case& golden, reference::aft_options& options) {
  options.causal = golden.flag("causal", false);
  options.gate = !golden.has("gate") || golden.text("gate") == "sigmoid";
  options.lengths = golden.integers("lengths");
}

template <class Options>
std::string name_of_biases(const problem<Options>& p) {
  if constexpr (requires { p.options.band; }) return p.options.band ? "band" : "w";
  return "w";
}

// `biases`: arrays that may hold them, none or one in a case.
template <class Options>
golden_operator aft_entry(const char* name, const std::set<std::string>& keys, const std::set<std::string>& biases,
                          problem<Options> (*read)(const golden_case&)) {
  const auto by_library = [=](const golden_case& golden, auto zero) -> reference::result {
    attn::execution serial;
    return {run_aft<decltype(zero)>(read(golden), serial), {}};
  };
  return with_gradients(
      {name, with({"operator", "source", "tolerance", "causal", "lengths", "gate"}, keys),
       with({"q", "k", "v", "out"}, biases),
       [=](const golden_case& golden) -> reference::result {
         return {expected(read(golden)), {}};
       },
       [=](const golden_case& golden) { return by_library(golden, widest_type()); },
       [=](const golden_case& golden) { return by_library(golden, float()); }},
      read,
      [](const problem<Options>& p) {
        gradient_case c = aft_gradient_case(p);
        if (c.names.size() > 3) c.names[3] = name_of_biases(p);
        return c;
      },
      [](const problem<Options>& p, const tensor<double>& d_out, auto zero) {
        using T = decltype(zero);
        attn::execution serial;
        const std::vector<tensor<T>> all = run_aft_backward<T>(p, cast<T>(d_out), serial);
        const std::string names[] = {"q", "k", "v", name_of_biases(p)};
        named_tensors named;
        for (std::size_t n = 0; n < all.size(); ++n) named[names[n]] = cast<double>(all[n]);
        return named;
      });
}

}  // namespace testing
