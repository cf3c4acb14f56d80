#include "golden/gradients.hpp"
#include "support/call_low_rank.hpp"

namespace testing::nystrom_golden {
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

named_tensors case_by_reference(const golden_case& golden) {
  const nystrom_problem p = read(golden);
  gradient_case c{"", {"q", "k", "v"}, {p.q, p.k, p.v}, {}};
  if (!p.options.convolution.empty()) c.names.push_back("conv"), c.inputs.push_back(p.options.convolution);
  c.forward = [&p](const std::vector<tensor<variable>>& x) {
    const tensor<variable> convolution = x.size() > 3 ? x[3] : tensor<variable>();
    return std::vector{reference::nystrom<variable>(x[0], x[1], x[2], convolution, p.options)};
  };
  return reverse_gradients(c, golden.array("d_out"));
}

template <class T>
named_tensors case_by_library(const golden_case& golden) {
  const nystrom_problem p = read(golden);
  const tensor<T> q = cast<T>(p.q), k = cast<T>(p.k), v = cast<T>(p.v), d_out = cast<T>(golden.array("d_out")),
                  convolution = cast<T>(p.options.convolution);
  tensor<T> dq = q, dk = k, dv = v, d_convolution = convolution;
  attn::nystrom_gradients<T> g{.q = view(dq), .k = view(dk), .v = view(dv)};
  if (!convolution.empty()) g.convolution = {d_convolution.data.data(), {convolution.length(), convolution.dim()}};
  attn::execution serial;
  compiled_nystrom<T>::backward(view(q), view(k), view(v), view(d_out), g, library_options<T>(p.options, convolution),
                                serial);
  return {
      {"q", cast<double>(dq)}, {"k", cast<double>(dk)}, {"v", cast<double>(dv)}, {"conv", cast<double>(d_convolution)}};
}

// The gradient of k goes back through every step of the inverse's iteration, and each adds the rounding of its three
// products: in proportion to the steps. 2e-5 is for the six of the default; a case of twelve errs by 2.01e-5.
double gradient_factor(const golden_case& golden, const std::string& of) {
  const nystrom_problem p = read(golden);
  if (of != "k" || p.options.inverse == reference::pinv::exact) return 1;
  return std::max(1.0, static_cast<double>(p.options.iterations) / 6);
}

golden_operator golden_nystrom() {
  return {"nystrom",
          {"operator", "source", "tolerance", "causal", "scale", "lengths", "query_lengths", "key_lengths", "landmarks",
           "iterations", "pinv"},
          {"q", "k", "v", "conv", "out"},
          [](const golden_case& golden) { return expected(read(golden)); },
          [](const golden_case& golden) { return run<widest_type>(read(golden)); },
          [](const golden_case& golden) { return run<float>(read(golden)); },
          case_by_reference,
          case_by_library<widest_type>,
          case_by_library<float>,
          gradient_factor};
}

const golden_entry entry(golden_nystrom());

}  // namespace
}  // namespace testing::nystrom_golden
