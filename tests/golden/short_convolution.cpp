#include "layers/short_convolution.hpp"

#include "golden/gradients.hpp"

namespace testing::short_convolution_golden {
namespace {

short_convolution_problem read(const golden_case& golden) {
  short_convolution_problem p{by_item(golden.array("x")), golden.array("weight"), golden.optional_array("bias"),
                              by_item(golden.optional_array("initial_state"))};
  const std::string f = golden.text("activation");
  if (f != "silu" && f != "none") throw std::runtime_error("no activation is called " + f);
  if (f == "silu") p.activation = attn::activation::silu;
  p.lengths = golden.integers("lengths");
  return p;
}

template <class S>
reference::result by_library(const golden_case& golden) {
  short_convolution_memory<S> m(read(golden));
  attn::execution serial;
  m.run(serial);
  return {as_read(cast<double>(m.out)), {}, as_read(cast<double>(m.final_state))};
}

// d_out, and behind it d_final_state, which may be missing.
tensor<double> d_both(const golden_case& golden, const short_convolution_problem& p) {
  const tensor<double> d = by_item(golden.array("d_out")), last = by_item(golden.optional_array("d_final_state"));
  tensor<double> both(p.x.batch(), 1, p.x.length() + p.weight.dim() - 1, p.x.dim());
  for (idx_t b = 0; b < d.batch(); ++b)
    for (idx_t i = 0; i < both.length(); ++i)
      for (idx_t c = 0; c < d.dim(); ++c)
        both(b, 0, i, c) = i < d.length() ? d(b, 0, i, c) : last.empty() ? 0 : last(b, 0, i - d.length(), c);
  return both;
}

named_tensors gradients_by_reference(const golden_case& golden) {
  const short_convolution_problem p = read(golden);
  return reverse_gradients(case_of(p), d_both(golden, p));
}
template <class S>
named_tensors gradients_by_library(const golden_case& golden) {
  const short_convolution_problem p = read(golden);
  const gradient_case c = case_of(p);
  std::vector<tensor<S>> in;
  for (const auto& x : c.inputs) in.push_back(cast<S>(x));
  auto all = in;
  std::vector<tensor<S>*> to;
  for (auto& g : all) to.push_back(&g);
  attn::execution serial;
  short_convolution_gradients_of<S>(p, in, cast<S>(d_both(golden, p)), to, false, serial);
  named_tensors named;
  for (std::size_t n = 0; n < all.size(); ++n) named[c.names[n]] = cast<double>(all[n]);
  return named;
}

const golden_entry entry({"short_convolution",
                          {"operator", "source", "tolerance", "activation", "lengths"},
                          {"x", "weight", "bias", "initial_state", "out", "final_state"},
                          [](const golden_case& golden) -> reference::result {
                            auto r = read(golden).by_reference();
                            return {as_read(std::move(r.out)), {}, as_read(std::move(r.final_state))};
                          },
                          by_library<widest_type>,
                          by_library<float>,
                          gradients_by_reference,
                          gradients_by_library<widest_type>,
                          gradients_by_library<float>});

}  // namespace
}  // namespace testing::short_convolution_golden
