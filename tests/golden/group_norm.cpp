#include "layers/group_norm.hpp"

#include "golden/gradients.hpp"

namespace testing::group_norm_golden {
namespace {

group_norm_problem read(const golden_case& golden) {
  return {by_item(golden.array("x")), golden.optional_array("gamma"), golden.optional_array("beta"),
          golden.integer("heads"), golden.number("norm_eps")};
}

template <class S>
reference::result by_library(const golden_case& golden) {
  attn::execution serial;
  return {as_read(cast<double>(group_norm_of<S>(read(golden), serial))), {}};
}

template <class S>
named_tensors gradients_by_library(const golden_case& golden) {
  const auto c = case_of<S>(read(golden));
  return named_gradients<S>(c.reference, [&](const auto& in) {
    attn::execution serial;
    return all_gradients(c, in, cast<S>(by_item(golden.array("d_out"))), serial);
  });
}

const golden_entry entry({"group_norm",
                          {"operator", "source", "tolerance", "heads", "norm_eps"},
                          {"x", "gamma", "beta", "out"},
                          [](const golden_case& golden) -> reference::result {
                            const auto p = read(golden);
                            return {as_read(reference::group_norm(p.x, p.gamma, p.beta, p.heads, p.eps)), {}};
                          },
                          by_library<widest_type>,
                          by_library<float>,
                          [](const golden_case& golden) {
                            return reverse_gradients(case_of<double>(read(golden)).reference,
                                                     by_item(golden.array("d_out")));
                          },
                          gradients_by_library<widest_type>,
                          gradients_by_library<float>});

}  // namespace
}  // namespace testing::group_norm_golden
