#include "layers/token_shift.hpp"

#include "golden/gradients.hpp"

namespace testing::token_shift_golden {
namespace {

// Cases hold states as [B, C], which is read as [1, 1, B, C].
tensor<double> state_by_item(tensor<double> x) {
  if (!x.empty()) x.extents = {x.extents[2], 1, 1, x.extents[3]};
  return x;
}
tensor<double> state_as_read(tensor<double> x) {
  x.extents = {1, 1, x.extents[0], x.extents[3]};
  return x;
}

token_shift_problem read(const golden_case& golden) {
  return {by_item(golden.array("x")), golden.optional_array("mix"),
          state_by_item(golden.optional_array("initial_state")), golden.integers("lengths")};
}

template <class S>
reference::result by_library(const golden_case& golden) {
  token_shift_memory<S> m(read(golden));
  attn::execution serial;
  m.run(serial);
  return {as_read(cast<double>(m.out)), {}, state_as_read(cast<double>(m.final_state))};
}

// d_out, and behind it d_final_state, which may be missing.
tensor<double> d_both(const golden_case& golden) {
  const tensor<double> d = by_item(golden.array("d_out")),
                       last = state_by_item(golden.optional_array("d_final_state"));
  tensor<double> both(d.batch(), 1, d.length() + 1, d.dim());
  for (idx_t b = 0; b < d.batch(); ++b)
    for (idx_t i = 0; i <= d.length(); ++i)
      for (idx_t c = 0; c < d.dim(); ++c)
        both(b, 0, i, c) = i < d.length() ? d(b, 0, i, c) : last.empty() ? 0 : last(b, 0, 0, c);
  return both;
}

template <class S>
named_tensors gradients_by_library(const golden_case& golden) {
  const auto c = case_of<S>(read(golden));
  std::vector<tensor<S>> in;
  for (const auto& x : c.reference.inputs) in.push_back(cast<S>(x));
  attn::execution serial;
  const auto all = all_gradients(c, in, cast<S>(d_both(golden)), serial);
  named_tensors named;
  for (std::size_t n = 0; n < all.size(); ++n) named[c.reference.names[n]] = cast<double>(all[n]);
  return named;
}

const golden_entry entry({"token_shift",
                          {"operator", "source", "tolerance", "lengths"},
                          {"x", "mix", "initial_state", "out", "final_state"},
                          [](const golden_case& golden) -> reference::result {
                            auto r = read(golden).by_reference();
                            return {as_read(std::move(r.out)), {}, state_as_read(std::move(r.final_state))};
                          },
                          by_library<widest_type>,
                          by_library<float>,
                          [](const golden_case& golden) {
                            return reverse_gradients(case_of<double>(read(golden)).reference, d_both(golden));
                          },
                          gradients_by_library<widest_type>,
                          gradients_by_library<float>});

}  // namespace
}  // namespace testing::token_shift_golden
