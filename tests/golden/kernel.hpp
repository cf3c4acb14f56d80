#pragma once
// What the entries of kernel attention share.
#include "golden/gradients.hpp"
#include "support/gradient_kernel.hpp"

namespace testing {

inline const std::set<std::string> kernel_keys = {"operator", "source",        "tolerance",   "causal",
                                                  "lengths",  "query_lengths", "key_lengths", "eps"};

inline void read_kernel_options(const golden_case& golden, reference::kernel_options& options) {
  options.causal = golden.flag("causal", false);
  options.lengths = golden.integers("lengths");
  options.query_lengths = golden.integers("query_lengths");
  options.key_lengths = golden.integers("key_lengths");
  if (golden.has("eps")) options.eps = golden.number("eps");
}

// `gate`: what the operator calls its own.
template <class Problem>
golden_operator kernel_entry(const char* name, const std::set<std::string>& keys, const std::set<std::string>& arrays,
                             Problem (*read)(const golden_case&), std::string gate = "gate") {
  return with_gradients(
      {name, with(kernel_keys, keys), with({"q", "k", "v", "out"}, arrays),
       [=](const golden_case& golden) { return expected(read(golden)); },
       [=](const golden_case& golden) { return run_serially<widest_type>(read(golden)); },
       [=](const golden_case& golden) { return run_serially<float>(read(golden)); }},
      read,
      [=](const Problem& p) {
        gradient_case c = case_of(p);
        std::replace(c.names.begin(), c.names.end(), std::string("gate"), gate);
        return c;
      },
      [=](const Problem& p, const tensor<double>& d_out, auto zero) {
        const tensors all = gradients_by<decltype(zero)>(p, d_out);
        named_tensors named;
        for (std::size_t n = 0; n < all.size(); ++n)
          named[gradient_names[n] == "gate" ? gate : gradient_names[n]] = all[n];
        return named;
      });
}

}  // namespace testing
